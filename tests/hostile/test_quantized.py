"""Spoiled quantized checkpoints of every layout are refused in a sentence; harmless changes are read."""

import logging
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moedge.offload.checkpoint.checkpoint import Checkpoint
from moedge.runtime.model.dequantize import dequantize
from moedge.runtime.shape.checkpoint_shape import read_tensors
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.model_shape import ModelShape
from support.hostile.cases import Case, judge
from support.hostile.draft import take_apart
from support.hostile.quantized import ACCEPT, MUTATIONS, REFUSE
from support.quantized_checkpoints import write_quantized

LAYOUTS = (
    "fp8 blocks", "fbgemm", "bnb int8", "bnb nf4", "ct int4 g64 asym", "ct fp8 rows", "ct nvfp4", "gptq v1 act order",
    "awq", "mxfp4",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def write(layout: str) -> Path:
        if layout not in folders:
            folder = tmp_path_factory.mktemp("layout")
            family = "gpt_oss" if layout == "mxfp4" else "qwen3_moe"
            write_quantized(layout, folder / "quantized", folder / "wide", family)
            folders[layout] = folder / "quantized"
        return folders[layout]

    return write


def widen_all(folder: Path, shape: ModelShape) -> None:
    """Reads and widens every quantized weight; what is packed must be finite."""
    with Checkpoint(folder) as checkpoint:
        for weight in read_tensors(ModelConfig.read(folder), checkpoint).quantized.values():
            if not dequantize(checkpoint, weight, torch.float32).isfinite().all():
                raise ValueError("not finite")


def spoiled(folder: Path, seed: int) -> Case | None:
    rng = random.Random(seed)
    name = list(MUTATIONS)[seed % len(MUTATIONS)]
    draft = take_apart(folder)
    verdict = MUTATIONS[name](draft, rng)
    return None if verdict is None else Case((name,), draft, verdict)


def verdicts(folder: Path, seeds: range, scratch: Path) -> tuple[list[tuple[object, ...]], Counter[str]]:
    wrong, counts = [], Counter[str]()
    for seed in seeds:
        if (case := spoiled(folder, seed)) is None:
            continue
        outcome = judge(case, scratch, widen_all)
        counts[case.verdict] += 1
        # `pack_into` refuses what is not finite, in a sentence.
        if outcome.wrong and "not finite" not in outcome.message:
            wrong.append((seed, case.kinds, outcome.wrong, outcome.message))
    return wrong, counts


@pytest.mark.sample("ct int4 g64 asym", "bnb nf4")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_spoiled_layout_gets_its_verdict(layout: str, written: Callable[[str], Path], tmp_path: Path) -> None:
    wrong, counts = verdicts(written(layout), range(3 * len(MUTATIONS)), tmp_path / "case")
    assert not wrong
    assert counts[REFUSE] >= 15
    assert counts[ACCEPT] >= 1
