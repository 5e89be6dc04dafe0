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
of a model with image or audio input is its text model (`gemma4_text` of `gemma4`). Such a checkpoint runs for text if
its own type is `aria`, `gemma3`, `gemma4`, `gemma4_unified`, `llama4`, `llava`, `mistral3`, `qwen3_5` or
`qwen3_5_moe`: tensors of its other parts are not read and not counted, and rows with images are refused. Rotary
embeddings that depend on the longest sequence (`dynamic`, `longrope`) are refused in every family: a row's answer
would depend on the other rows of its batch. Code that a checkpoint brings (`auto_map` in config.json, as of
DeepSeek-V3 or Kimi-Linear) is never run: transformers' class computes the family, and `plan` and `batch` say so in a
line; a family that transformers does not have is refused.

The families with sparse attention by an indexer, `axk2`, `deepseek_v32` and `glm_moe_dsa`, attend to the `index_topk`
tokens that it chooses (2,048 in published models). Its keys are cached beside the latents: 256 bytes a token and layer
in bf16, 130 under `--kv int8` and `int4`.
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


# Which families stand for which, by how their checkpoints hold matrices.
FAMILY_GROUPS = {"experts one by one": "qwen3_moe", "stacked experts": "gpt_oss", "dense": "llama"}
FORMATS_HEAD = """## Quantized checkpoints

What becomes of the weights of a quantized checkpoint: *kept* ones have the codes and scales of the files, bit by bit;
others are *widened* to floats, a matrix at a time in memory, and packed again. Every row ran: the checkpoint was
written by the format's own library (compressed-tensors, bitsandbytes, transformers) or by its published layout (GPTQ,
AWQ), and its weights were those of that library. After *packed in* is what `--quant auto` takes where everything fits;
`nf4 loses` is the relative L2 error of packing the weights again in nf4. Other methods (AQLM, HQQ, TorchAO, Quark,
ModelOpt, ...) are refused with their name. `moedge check MODEL` compares the logits of any checkpoint with those of
transformers ([quality.md](quality.md#against-transformers)).

GGUF files (`pip install 'moedge[formats]'`) are given by their path, or as `owner/repository/FILE.gguf`; any part
names a split one. Their architectures are llama (with experts: `mixtral`), qwen2, qwen2moe, qwen3, qwen3moe, gpt-oss,
gemma2 and gemma3; configuration, tokenizer and chat template are those of the file. Llama 3's rotary scaling, which a
file does not name, is recognized by its factors. Types that are not in the table are widened, too. The package gguf
wrote the files of the table, with random blocks where it only dequantizes a type.
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
