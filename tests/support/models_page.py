"""docs/tables/models.md: what ran, as a page, and the page read back."""

import json
import re
from pathlib import Path

from moedge.runtime.shape.families import DENSE, MOE, WANTING, WRAPPERS

HEAD = """# Families and formats that were run

`make matrix` generates this page from runs; [models](../models.md) says what it means. Columns are releases of
transformers at both ends of the supported range.
"""

WRAPPERS_HEAD = """## Models that also see or hear

Their text models run, with the tokens of the whole model for text (tests/runtime/test_multimodal.py, with the newest
release). A file may name another family's text model than the usual one. Of `qwen3_omni_moe` and `qwen2_5_omni` the
thinker is read.

| type | text model |
|---|---|
"""

REFUSED_HEAD = """## Refused

Beside these: models in which an encoder reads the prompt.

| family | what is missing |
|---|---|
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
    rows = [f"| {whole} | {text} |" for whole, text in sorted(WRAPPERS.items())]
    sections.append(WRAPPERS_HEAD + "\n".join(rows) + "\n")
    rows = [f"| `{family}` | {reason} |" for reason, members in WANTING.items() for family in members]
    sections.append(REFUSED_HEAD + "\n".join(rows) + "\n")
    return "\n".join(sections)


def verdicts(path: Path) -> dict[str, list[str]]:
    """What a page says of each family, by column."""
    found = {}
    for line in path.read_text().splitlines():
        if match := re.match(r"\| `([\w.-]+)` \| (.*) \|$", line):
            found[match[1]] = match[2].split(" | ")
    return found


def _cell(result: str) -> str:
    return result.replace("|", "/").replace("\n", " ")[:160]


# Which families stand for which, by how their checkpoints hold matrices.
FAMILY_GROUPS = {"experts one by one": "qwen3_moe", "stacked experts": "gpt_oss", "dense": "llama"}
FORMATS_HEAD = """## Quantized checkpoints

What becomes of the weights: *kept* ones have the codes and scales of the files, bit by bit; others are *widened* to
floats and packed again. Every row ran: the checkpoint was written by the format's own library (compressed-tensors,
bitsandbytes, transformers, gguf) or by its published layout (GPTQ, AWQ), and its weights were those of that library.
After *packed in* is what `--quant auto` takes where everything fits; `nf4 loses` is the relative L2 error of packing
the weights again in nf4. GGUF files have random blocks where the package gguf only dequantizes a type.
"""
_NAMES = {
    "fp8 blocks": "FP8, blocks (`weight_scale_inv`)", "mxfp8": "MXFP8", "fbgemm": "FP8, rows (FBGEMM)",
    "bnb int8": "bitsandbytes int8", "bnb nf4": "bitsandbytes NF4, nested", "bnb fp4 single": "bitsandbytes FP4",
    "awq": "AWQ, GEMM, groups of 32", "gptq v1": "GPTQ v1, 4 bits, groups of 32",
    "gptq v1 act order": "GPTQ v1, 4 bits, act-order", "gptq v2 g128": "GPTQ v2, 4 bits, groups of 128",
    "ct int4 g32": "compressed-tensors int4 g32, fp32 scales",
    "ct int8 g128": "compressed-tensors int8 g128, fp32 scales",
    "ct int4 g64 asym": "compressed-tensors int4 g64 asym, fp32 scales",
    "ct mixed": "compressed-tensors, int4 experts and fp8 attention",
    "gptq 3 bits": "GPTQ v1, 3 bits", "gptq 8 bits": "GPTQ v1, 8 bits", "mxfp4": "MXFP4 (gpt-oss)",
}  # fmt: skip


def formats_section(results: dict[str, dict[str, str]]) -> str:
    """The table of quantized checkpoints: formats by group of families."""
    header = f"| format | {' | '.join(FAMILY_GROUPS)} |\n|---|{'---|' * len(FAMILY_GROUPS)}"
    rows = [
        f"| {_NAMES.get(form) or form.replace('ct ', 'compressed-tensors ')} | "
        f"{' | '.join(_cell(found.get(group, '')) for group in FAMILY_GROUPS)} |"
        for form, found in results.items()
    ]
    return f"{FORMATS_HEAD}\n{header}\n" + "\n".join(rows) + "\n"


def with_formats(text: str, results: dict[str, dict[str, str]]) -> str:
    """A page with that section at its end, instead of the one that it has."""
    return f"{text.removesuffix(formats_of(text)).rstrip()}\n\n{formats_section(results)}"


def formats_of(text: str) -> str:
    """That section of a page, after an empty line; empty where it has none."""
    _, title, section = text.partition("\n## Quantized checkpoints\n")
    return title + section
