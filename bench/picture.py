"""Draws README's picture and writes its table, from what `bench.compare --record` measured.

    python -m bench.picture docs/measurements/*.json --out docs/under-a-ceiling.svg --readme README.md

A panel for each record: generated tokens per second by sequences, of the best setting of each engine. The table goes
between the two comments in README that name this script.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BEGIN = "<!-- python -m bench.picture writes this table -->"
END = "<!-- end of the table -->"
ENGINES = {"moedge": "#0b6e8f", "llama.cpp": "#b0413e", "accelerate": "#d08a1d", "transformers": "#7a6aa8"}
Record = dict[str, Any]


def best(record: Record) -> dict[str, dict[int, float]]:
    """Generated tokens/s by sequences of each engine's best setting; what a ceiling killed has no entry."""
    found: dict[str, dict[int, float]] = {}
    for one in record["contenders"]:
        engine = one["title"].split()[0]
        for sequences, speeds in one["tokens_per_second"].items():
            speed = speeds["generated"]
            at = found.setdefault(engine, {})
            at[int(sequences)] = max(speed, at.get(int(sequences), 0.0))
    return {engine: dict(sorted(found[engine].items())) for engine in ENGINES if engine in found}


def table(records: list[Record]) -> str:
    """Markdown: a row for each record and engine, a column for each number of sequences."""
    counts = sorted({count for record in records for speeds in best(record).values() for count in speeds})
    lines = [f"| generated tokens/s, by sequences | {' | '.join(map(str, counts))} |", "|---" * (len(counts) + 1) + "|"]
    for record in records:
        for engine, speeds in best(record).items():
            cells = [speed(speeds[one]) if one in speeds else "-" for one in counts]
            lines.append(f"| {record['title']}, {engine} | {' | '.join(cells)} |")
    return "\n".join(lines)


def speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.1f}"


def with_table(page: str, records: list[Record]) -> str:
    """Raises SystemExit where the page lacks the two comments."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"the page has no lines {BEGIN!r} and {END!r}")
    return pattern.sub(lambda _: f"{BEGIN}\n{table(records)}\n{END}", page)


@contextmanager
def pyplot() -> Iterator[Any]:
    """matplotlib.pyplot for SVG files whose text is text, and whose bytes depend on the figures alone."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moedge", "font.family": "sans-serif"}):
        yield plt
    plt.close("all")


def draw(records: list[Record], out: Path) -> None:
    """An SVG on white, so that it is read on light and on dark pages."""
    with pyplot() as plt:
        figure, panels = plt.subplots(1, len(records), figsize=(4.6 * len(records), 3.4), squeeze=False, sharey=True)
        for panel, record in zip(panels[0], records, strict=True):
            draw_panel(panel, record)
        panels[0][0].set_ylabel("generated tokens/s")
        figure.text(0.01, 0.01, footnote(records), fontsize=7, color="#666")
        figure.tight_layout(rect=(0, 0.04, 1, 1))
        figure.savefig(out, format="svg", facecolor="white", metadata={"Date": None})


def draw_panel(panel: Any, record: Record) -> None:
    """Both axes are logarithmic: engines differ by factors."""
    for engine, speeds in best(record).items():
        color, above = ENGINES[engine], engine == "moedge"
        panel.plot(list(speeds), list(speeds.values()), color=color, marker="o", label=engine)
        for at in speeds.items():
            panel.annotate(
                speed(at[1]), at, textcoords="offset points", xytext=(0, 6 if above else -13), ha="center",
                fontsize=8, color=color,
            )  # fmt: skip
    panel.set(xscale="log", yscale="log", xlabel="sequences", title=record["title"])
    counts = sorted({one for speeds in best(record).values() for one in speeds})
    panel.set_xticks(counts, [str(one) for one in counts])
    panel.yaxis.set_major_formatter("{x:g}")
    panel.minorticks_off()
    panel.margins(x=0.12, y=0.18)
    panel.grid(visible=True, color="#e4e4e4")
    panel.legend(frameon=False, loc="upper left")


def footnote(records: list[Record]) -> str:
    return "; ".join(sorted({f"{one['processor']}, {one['cores']} cores, {one['date']}" for one in records}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--readme", type=Path)
    options = parser.parse_args()
    records = [json.loads(file.read_text()) for file in options.records]
    draw(records, options.out)
    if options.readme:
        options.readme.write_text(with_table(options.readme.read_text(), records))
    print(table(records))


if __name__ == "__main__":
    main()
