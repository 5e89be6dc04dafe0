"""Layers as large as those of real models: what preparing one of 4 GB takes, and gpt-oss-20b's in its own 4.25 bits.

Each part writes its checkpoint, of up to 4 GB, and removes it. A layer of 4 GB in bf16 is written in every format that
is read; all of its experts have the same codes, so that writing is quick. It is prepared with `--ram 2GiB`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from matrix.formats import GGUF
from matrix.state import Part
from moedge.offload.store.store import Store
from moedge.runtime.evaluation.check import check
from moedge.runtime.settings.settings import Budgets
from support.gguf_files import build, save_tokenizer, to_gguf
from support.quantized_checkpoints import FORMATS, is_quantized, mixed, mxfp4_blocks
from support.tiny_families import save_tiny

BUDGET_GIB, STORE_GIB = 2, 5
# An expert has 6.3 M weights, 320 of them 4.03 GB in bf16; one of gpt-oss's shape has 24.9 M, 81 of them 4.03 GB.
WIDE: dict[str, Any] = {
    "hidden_size": 2048, "moe_intermediate_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 1, "num_experts_per_tok": 1,
}  # fmt: skip
OSS: dict[str, Any] = {
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
COPIES, OSS_COPIES = 320, 81
PER_FILE = 40


def parts(quick: bool) -> Iterator[Part]:
    transformers.logging.set_verbosity_error()
    forms = ["bf16", *FORMATS, "mxfp4", *(f"gguf {kind}" for kind in GGUF)]
    if not quick:
        yield Part("gpt-oss-20b's layers", gpt_oss_20b)
    for form in ["ct int4 g32 bf16"] if quick else forms:
        yield Part(f"4 GB in {form}", partial(prepared_within_budget, form))


def prepared_within_budget(form: str) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        model, store = write_wide(form, Path(scratch)), Path(scratch) / "store"
        command = [sys.executable, "-m", "moedge", "prepare", str(model), "-o", str(store)]
        # `auto` would leave 10 GiB of the disk free.
        budgets = ["--ram", f"{BUDGET_GIB}GiB", "--disk", f"{STORE_GIB}GiB"]
        done = subprocess.run([*command, *budgets], capture_output=True, text=True, check=False)
    if done.returncode:
        return [f"exit code {done.returncode}: {done.stderr.strip()[-600:]}"]
    found = re.search(r"peak ([\d.,]+) (MiB|GiB) of RAM", done.stderr)
    if found is None:
        return [f"no peak in {done.stderr[-300:]!r}"]
    peak = float(found[1].replace(",", "")) / (1024 if found[2] == "MiB" else 1)
    print(f"  peak {peak:.2f} GiB; {done.stderr.strip().splitlines()[-1]}", flush=True)
    return [f"peak {peak:.2f} GiB"] if peak > BUDGET_GIB else []


def write_wide(form: str, folder: Path) -> Path:
    """The path of a checkpoint with one layer, whose experts are 4 GB in bf16."""
    if form.startswith("gguf "):
        model = build("qwen3_moe", **WIDE)
        model.config.num_experts, model.config.num_experts_per_tok = COPIES, 8
        tokenizer = save_tokenizer(folder / "tokenizer", model.config.vocab_size)
        return to_gguf(model, folder / "model.gguf", form.removeprefix("gguf "), tokenizer, copies=COPIES)
    if form == "mxfp4":
        sizes = {**OSS, "num_hidden_layers": 1, "num_local_experts": 1, "num_experts_per_tok": 1}
        save_tiny("gpt_oss", folder, **sizes)
        return _write(folder, {"quant_method": "mxfp4"}, mxfp4_blocks, OSS_COPIES)
    save_tiny("qwen3_moe", folder, **WIDE)
    writer, config = FORMATS[form] if form != "bf16" else (_bf16, None)
    return _write(folder, config, writer, COPIES)


def _bf16(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return {".weight": weight.bfloat16()}, weight


def _write(folder: Path, config: dict[str, Any] | None, writer: Callable[..., Any], copies: int) -> Path:
    """Quantizes the checkpoint with one expert in `folder`, and gives it `copies` of that expert."""
    floats = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shared: dict[str, Tensor] = {}
    expert: dict[str, Tensor] = {}
    for name, tensor in floats.items():
        made = {name: tensor.bfloat16()}
        if writer is mxfp4_blocks and tensor.dim() == 3:
            made = {f"{name}{suffix}": value for suffix, value in writer(tensor.transpose(1, 2))[0].items()}
        elif writer is not mxfp4_blocks and is_quantized(name, tensor):
            found = mixed(tensor, "experts" in name) if writer is mixed else writer(tensor)
            made = {name.removesuffix(".weight") + suffix: value for suffix, value in found[0].items()}
        (expert if ".experts.0." in name else shared).update(made)
    for name in [name for name in shared if ".experts." in name or name.endswith(("router.weight", "router.bias"))]:
        shared[name] = shared[name].repeat(copies, *[1] * (shared[name].dim() - 1))
    for name in [name for name in shared if name.endswith("mlp.gate.weight")]:
        shared[name] = shared[name].repeat(copies, 1)
    files = [shared, *(_copies(expert, begin, copies) for begin in range(0, copies if expert else 0, PER_FILE))]
    weight_map = {}
    for index, tensors in enumerate(files):
        file = f"model-{index}.safetensors"
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    values = json.loads((folder / "config.json").read_text())
    values |= {"num_experts": copies, "num_local_experts": copies, "num_experts_per_tok": 8, "dtype": "bfloat16"}
    if config is not None:
        values["quantization_config"] = config
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def _copies(expert: dict[str, Tensor], begin: int, total: int) -> dict[str, Tensor]:
    many = range(begin, min(begin + PER_FILE, total))
    return {
        name.replace(".experts.0.", f".experts.{index}."): value.clone()
        for index in many
        for name, value in expert.items()
    }


def gpt_oss_20b() -> list[str]:
    """Two layers of gpt-oss-20b's shape, prepared and computed: bytes of the store, and greedy tokens."""
    with tempfile.TemporaryDirectory() as scratch:
        model = write_gpt_oss(Path(scratch) / "model", num_hidden_layers=2, num_local_experts=32, **OSS)
        stored = sum(path.stat().st_size for path in model.glob("experts-*.safetensors"))
        found = check(model, dtype="fp32", budgets=Budgets(ram="12GiB", gpu_mem="0", disk_dir=Path(scratch) / "stores"))
        store = Path(scratch) / "store"
        done = subprocess.run([sys.executable, "-m", "moedge", "prepare", str(model), "-o", str(store)], check=False)
        if done.returncode:
            return [f"prepare exited with {done.returncode}"]
        with Store.open(store) as opened:
            expert = sum(extent.nbytes for extent in opened.extents() if extent.tensor == "experts")
    print(f"  experts: {stored:,} bytes in the checkpoint, {expert:,} in the store ({expert / stored:.3%}); {found}")
    faults = [] if abs(expert / stored - 1) <= 0.02 else [f"the store has {expert / stored:.1%} of the experts' bytes"]
    if found.greedy_same != found.greedy_total or not found.within:
        faults.append(f"differs from transformers: {found}")
    return faults


def write_gpt_oss(folder: Path, **sizes: int) -> Path:
    """A checkpoint as transformers writes it, with random valid codes of weights that keep their inputs' scale."""
    count, layers = sizes["num_local_experts"], sizes["num_hidden_layers"]
    save_tiny("gpt_oss", folder, **{**sizes, "num_local_experts": 4, "num_experts_per_tok": 4})
    tensors = {name: each for name, each in load_file(folder / "model.safetensors").items() if each.dim() != 3}
    (folder / "model.safetensors").unlink()
    generator = torch.Generator().manual_seed(20)
    for name in [name for name in tensors if ".experts." in name or ".router." in name]:
        tensors[name] = torch.randn(count, *tensors[name].shape[1:], generator=generator) * 0.1
    # Scores of attention and of routers then are about 1: larger ones would multiply errors of rounding.
    for name in [name for name in tensors if "proj.weight" in name or name.endswith("router.weight")]:
        spread = sizes["hidden_size"] ** -0.5
        tensors[name] = torch.randn(tensors[name].shape, generator=generator) * spread
    files = {"rest.safetensors": {name: each.bfloat16() for name, each in tensors.items()}}
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    for layer in range(layers):
        codes = files[f"experts-{layer}.safetensors"] = {}
        for side, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            shape = (count, rows, columns // 32)
            name = f"model.layers.{layer}.mlp.experts.{side}"
            codes[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
            codes[f"{name}_scales"] = torch.randint(118, 121, shape, dtype=torch.uint8, generator=generator)
    for file, each in files.items():
        save_file(each, folder / file, {"format": "pt"})
    weight_map = {name: file for file, each in files.items() for name in each}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    values = json.loads((folder / "config.json").read_text())
    values |= {"num_local_experts": count, "dtype": "bfloat16", "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(values))
    return folder
