"""Reads every layout of quantized checkpoints in every group of families, and writes the table of docs/models.md.

Weights must be those of the format's own library or definition; then the checkpoint is prepared as `--quant auto` would
where everything fits, and in nf4. Results are in build/matrix/quantized.json.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from matrix.state import FOLDER, ROOT, Part
from moedge.offload.checkpoint.checkpoint import Checkpoint
from moedge.quant.formats.format import QUANT_FORMATS
from moedge.runtime.loading.prepare import precision, prepare
from moedge.runtime.model.dequantize import dequantize
from moedge.runtime.settings.budgets import Budgets
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.read import read_tensors
from moedge.runtime.source.model_source import open_source
from support.models_page import FAMILY_GROUPS, with_formats
from support.quantized_checkpoints import FORMATS, write_quantized

RESULTS = FOLDER / "quantized.json"
PAGE = ROOT / "docs" / "models.md"
QUICK = ("awq", "fp8 blocks")


def parts(quick: bool) -> Iterator[Part]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    for form in QUICK if quick else [*FORMATS, "mxfp4"]:
        yield Part(form, partial(record, form))
    if not quick:
        yield Part("docs/models.md", write_page)


def record(form: str) -> list[str]:
    """The groups of families whose weights are not what they should be."""
    found = {}
    for group, family in FAMILY_GROUPS.items():
        # gpt-oss stacks its experts, and only MXFP4 does that to quantized ones.
        if (form == "mxfp4") == (family == "gpt_oss"):
            with tempfile.TemporaryDirectory() as folder:
                found[group] = outcome(form, family, Path(folder))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results | {form: found}, indent=1))
    return [f"{form}, {group}: {each}" for group, each in found.items() if each.startswith("differs")]


def outcome(form: str, family: str, folder: Path) -> str:
    write_quantized(form, folder / "quantized", folder / "wide", family)
    wanted = load_file(folder / "wide" / "model.safetensors")
    with Checkpoint(folder / "quantized") as files:
        for name, weight in read_tensors(ModelConfig.read(folder / "quantized"), files).quantized.items():
            if not torch.allclose(dequantize(files, weight, torch.float32), wanted[name], rtol=1e-6, atol=0):
                return f"differs in {name}"
    with open_source(str(folder / "quantized")) as source:
        quant, dtype = precision(source, "auto", "auto")
        kept = not prepare(source, folder / "store", quant, dtype, Budgets())
        loss = prepare(source, folder / "nf4", "nf4", dtype, Budgets()).loss
    lossy = f"nf4 loses {100 * max(loss.values()):.0f} %"
    how = "kept as" if kept else "widened, packed in" if quant in QUANT_FORMATS else "in part kept as"
    return f"{how} `{quant}`; {lossy}"


def write_page() -> list[str]:
    PAGE.write_text(with_formats(PAGE.read_text(), json.loads(RESULTS.read_text())))
    return []
