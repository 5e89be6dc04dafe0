"""Reads every layout of quantized checkpoints in every group of families, and writes docs/tables/models.md.

Weights must be those of the format's own library or definition; then the checkpoint is prepared as `--quant auto` would
where everything fits, and in nf4. Results are in build/matrix/quantized.json.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from safetensors.torch import load_file

from matrix.state import FOLDER, ROOT, Part
from moedge.offload.checkpoint.checkpoint import Checkpoint
from moedge.offload.checkpoint.gguf_file import GgufCheckpoint
from moedge.quant.formats.format import QUANT_FORMATS
from moedge.runtime.loading.prepare import precision, prepare
from moedge.runtime.model.dequantize import dequantize
from moedge.runtime.settings.settings import Budgets
from moedge.runtime.shape.checkpoint_shape import read_config, read_tensors
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.source.model_source import open_source
from support.gguf_files import build, save_tokenizer, to_gguf
from support.models_page import FAMILY_GROUPS, with_formats
from support.quantized_checkpoints import FORMATS, write_quantized

RESULTS = FOLDER / "quantized.json"
PAGE = ROOT / "docs" / "tables" / "models.md"
QUICK = ("awq", "fp8 blocks", "gguf Q4_K")
GGUF = ("F16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "IQ4_XS", "MXFP4")
# Rows of whole blocks of K and I formats.
_WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}


def parts(quick: bool) -> Iterator[Part]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    for form in QUICK if quick else [*FORMATS, "mxfp4", *(f"gguf {kind}" for kind in GGUF)]:
        yield Part(form, partial(record, form))
    if not quick:
        yield Part("docs/tables/models.md", write_page)


def record(form: str) -> list[str]:
    """The groups of families whose weights are not what they should be."""
    found = {}
    for group, family in FAMILY_GROUPS.items():
        # gpt-oss stacks its experts, and only MXFP4 does that to quantized ones.
        if form.startswith("gguf ") or (form == "mxfp4") == (family == "gpt_oss"):
            with tempfile.TemporaryDirectory() as folder:
                found[group] = outcome(form, family, Path(folder))
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results | {form: found}, indent=1))
    return [f"{form}, {group}: {each}" for group, each in found.items() if each.startswith("differs")]


def outcome(form: str, family: str, folder: Path) -> str:
    if form.startswith("gguf "):
        path, wrong = folder / "model.gguf", _wrong_in_gguf(form.removeprefix("gguf "), family, folder)
    else:
        path, wrong = folder / "quantized", _wrong_in_folder(form, family, folder)
    if wrong:
        return f"differs in {wrong[0]}"
    with open_source(str(path)) as source:
        quant, dtype = precision(source, "auto", "auto")
        kept = not prepare(source, folder / "store", quant, dtype, Budgets().on_cpu())
        loss = prepare(source, folder / "nf4", "nf4", dtype, Budgets().on_cpu()).loss
    lossy = f"nf4 loses {100 * max(loss.values()):.0f} %"
    how = "kept as" if kept else "widened, packed in" if quant in QUANT_FORMATS else "in part kept as"
    how = "floats, packed in" if quant == "none" else how
    return f"{how} `{quant}`; {lossy}"


def _wrong_in_folder(form: str, family: str, folder: Path) -> list[str]:
    write_quantized(form, folder / "quantized", folder / "wide", family)
    wanted = load_file(folder / "wide" / "model.safetensors")
    with Checkpoint(folder / "quantized") as files:
        weights = read_tensors(ModelConfig.read(folder / "quantized"), files).quantized
        return [
            name
            for name, weight in weights.items()
            if not torch.allclose(dequantize(files, weight, torch.float32), wanted[name], rtol=1e-6, atol=0)
        ]


def _wrong_in_gguf(kind: str, family: str, folder: Path) -> list[str]:
    """Weights that differ from what gguf's own reader and dequantizers make of them, as a set of numbers."""
    path = to_gguf(build(family, **_WIDE), folder / "model.gguf", kind, save_tokenizer(folder / "tokenizer", 384))
    read = {
        each.name: torch.from_numpy(gguf.quants.dequantize(each.data, each.tensor_type).astype("float32"))
        for each in gguf.GGUFReader(path).tensors
    }
    with GgufCheckpoint(path) as files:
        weights = read_tensors(read_config(path), files).quantized
        return [name for name, weight in weights.items() if not _is_same(files, weight, read)]


def _is_same(files: GgufCheckpoint, weight: Any, read: dict[str, torch.Tensor]) -> bool:
    """Whether the numbers are the same, whatever the order of rows."""
    wanted = [read[name] if weight.expert is None else read[name][weight.expert] for name in weight.sources]
    numbers = torch.cat([each.flatten() for each in wanted]) + weight.added
    found = dequantize(files, weight, torch.float32).float()
    return torch.equal(found.flatten().sort().values, numbers.sort().values)


def write_page() -> list[str]:
    PAGE.write_text(with_formats(PAGE.read_text(), json.loads(RESULTS.read_text())))
    return []
