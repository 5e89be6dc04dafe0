"""docs/models.md: what ran, as a page, and the page read back."""

import json
import re
from pathlib import Path

from moedge.runtime.shape.families import DENSE, MOE, WANTING

HEAD = """# Models

This page lists the families of transformers that run, and why others are refused. `make matrix` generates it from
runs: a tiny random checkpoint of each family is saved, read back, streamed from disk at the smallest budget and run
in a batch with other sequences; with `--dtype fp32 --deterministic` its greedy tokens must equal those of
transformers' `generate`. The columns are releases of transformers at both ends of the supported range.

The family is the `model_type` in config.json; the models of a family share its code, whatever their size. The family
of a model with image or audio input is its text model (`gemma4_text` of `gemma4`); checkpoints of such whole models
are not supported yet. Rotary embeddings that depend on the longest sequence (`dynamic`, `longrope`) are refused in
every family: a row's answer would depend on the other rows of its batch.
"""


def page(results: list[Path]) -> str:
    """The page from files of results, one for each release."""
    columns = {path.stem: json.loads(path.read_text()) for path in results}
    sections = [HEAD]
    for title, families in (("Mixture of experts", MOE), ("Dense", DENSE)):
        counts = ", ".join(
            f"{sum(column.get(family) == 'works' for family in families)} with {release}"
            for release, column in columns.items()
        )
        both = sum(all(column.get(family) == "works" for column in columns.values()) for family in families)
        header = f"| family | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}"
        rows = [
            f"| `{family}` | {' | '.join(_cell(column.get(family, 'not run')) for column in columns.values())} |"
            for family in sorted(families)
        ]
        sections.append(f"## {title}\n\n{both} work with all of them: {counts}.\n\n{header}\n" + "\n".join(rows) + "\n")
    rows = [f"| `{family}` | {reason} |" for reason, members in WANTING.items() for family in members]
    sections.append("## Refused\n\n| family | what is missing |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(sections)


def verdicts(path: Path) -> dict[str, list[str]]:
    """What a page says of each family, by column."""
    found = {}
    for line in path.read_text().splitlines():
        if match := re.match(r"\| `(\w+)` \| (.*) \|$", line):
            found[match[1]] = match[2].split(" | ")
    return found


def _cell(result: str) -> str:
    return result.replace("|", "/").replace("\n", " ")[:160]
