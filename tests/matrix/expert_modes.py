"""Are tokens the same however experts are streamed and held? Every mode, policy, held share and mix of tiers.

Tiny random checkpoints of six families on a disk, in host memory, and on a fake device whose copies an adversarial
schedule orders: greedy tokens in fp32 must be those of a run that holds everything, and the counters must show how the
experts were streamed.
"""

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from matrix.state import Part
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.settings.settings import Budgets
from moedge.runtime.source.model_source import open_source
from support.device import expert_modes, fake_device, tiny_engine
from support.tiny_families import save_tiny

QUICK_STEP = 24


def parts(quick: bool) -> Iterator[Part]:
    torch.set_num_threads(2)
    for family in expert_modes.FAMILIES[:1] if quick else expert_modes.FAMILIES:
        yield Part(family, partial(faults, family, QUICK_STEP if quick else 1))


def faults(family: str, step: int = 1) -> list[str]:
    """Every `step`-th way to stream that gave other tokens, or was not the way that was asked for."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny(family, folder / "model")
        with open_source(str(folder / "model")) as source:
            prepare(source, folder / "store", "none", "fp32", Budgets().on_cpu())
            tiny = tiny_engine.Case(source, folder / "store", tiny_engine.exact("none"))
            wanted = tiny.run(tiny.plan(None)).tokens
            for way in list(expert_modes.ways())[::step]:
                found += [f"{way}: {fault}" for fault in expert_modes.faults(way, way.run(tiny, fake_device), wanted)]
    return found
