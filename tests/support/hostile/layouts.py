"""Quantized checkpoints of every layout, spoiled, and read as a job reads them."""

import random
from pathlib import Path

import torch

from moedge.offload.checkpoint.checkpoint import Checkpoint
from moedge.runtime.model.dequantize import dequantize
from moedge.runtime.shape.checkpoint_shape import read_tensors
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.model_shape import ModelShape
from support.hostile.cases import Case, Outcome, judge
from support.hostile.draft import take_apart
from support.hostile.quantized import MUTATIONS
from support.quantized_checkpoints import write_quantized

LAYOUTS = (
    "fp8 blocks", "fbgemm", "bnb int8", "bnb nf4", "ct int4 g64 asym", "ct fp8 rows", "ct nvfp4", "gptq v1 act order",
    "awq", "mxfp4",
)  # fmt: skip


def write_layout(layout: str, folder: Path) -> Path:
    """The folder of a sound checkpoint, made below `folder`."""
    family = "gpt_oss" if layout == "mxfp4" else "qwen3_moe"
    write_quantized(layout, folder / "quantized", folder / "wide", family)
    return folder / "quantized"


def widen_all(folder: Path, shape: ModelShape | None = None) -> None:
    """Reads and widens every quantized weight; what is packed must be finite."""
    with Checkpoint(folder) as checkpoint:
        for weight in read_tensors(ModelConfig.read(folder), checkpoint).quantized.values():
            if not dequantize(checkpoint, weight, torch.float32).isfinite().all():
                raise ValueError("not finite")


def spoiled(folder: Path, seed: int) -> Case | None:
    """One mutation of a checkpoint; None where it does not apply to its layout."""
    rng = random.Random(seed)
    name = list(MUTATIONS)[seed % len(MUTATIONS)]
    draft = take_apart(folder)
    verdict = MUTATIONS[name](draft, rng)
    return None if verdict is None else Case((name,), draft, verdict)


def judged(case: Case, scratch: Path) -> tuple[Outcome, str]:
    """What became of it, and what is wrong with that, empty for nothing."""
    outcome = judge(case, scratch, widen_all)
    # `pack_into` refuses what is not finite, in a sentence.
    return outcome, outcome.wrong if outcome.wrong and "not finite" not in outcome.message else ""
