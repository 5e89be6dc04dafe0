"""What passes cost beside their products, measured by passes of the bundled little model: for the machine's profile.

Its products are as good as nothing, so what is left is Python, torch's dispatch, threads that meet, and elementwise
work: the same code as in any model.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from importlib.resources import as_file, files

import torch

from ..moe.union import expected_union
from ..offload.machine.profile import Overheads
from .engine import Engine
from .load import load_engine
from .model_source import open_source
from .plan.job import JobShape
from .plan.planner import Settings, make_plan
from .sampling.params import SamplingParams
from .sequence import Sequence
from .shape.model_shape import ModelShape

# Sequences and prompt tokens of each: enough kinds of passes to tell the four costs apart.
KINDS = ((1, 16), (8, 16), (48, 16), (64, 64))
TOKENS = 4096
DECODED = 8
_BUDGET_NBYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class _Timed:
    """One pass: its tokens, the sequences in it, and its seconds."""

    tokens: int
    sequences: int
    seconds: float


def measure_overheads() -> Overheads:
    """About two seconds, on the processor."""
    with as_file(files("moedge.demo")) as bundle, open_source(str(bundle / "model")) as source:
        most = max(count for count, _ in KINDS)
        settings = Settings(quant="none", tokens_per_pass=TOKENS, max_sequences=most)
        plan = make_plan(source.shape, settings, _BUDGET_NBYTES, JobShape(most, 128))
        with closing(load_engine(source, plan)) as loaded:
            for count, length in KINDS:
                _passes(loaded.engine, source.shape, count, length)
            timed = [each for kind in KINDS for each in _passes(loaded.engine, source.shape, *kind)]
    return _solve(source.shape, timed)


def _passes(engine: Engine, shape: ModelShape, count: int, length: int) -> list[_Timed]:
    generator = torch.Generator().manual_seed(count)
    for _ in range(count):
        prompt = torch.randint(1, shape.vocab, (length,), generator=generator).tolist()
        engine.add(Sequence(prompt, SamplingParams(DECODED, ignore_eos=True)))
    engine.start_counting()
    timed = []
    while engine.busy:
        before, begun = engine.metrics.pass_tokens, time.perf_counter()
        engine.step()
        timed.append(_Timed(engine.metrics.pass_tokens - before, count, time.perf_counter() - begun))
    return [timed[0], min(timed[1:], key=lambda one: one.seconds)]


def _solve(shape: ModelShape, timed: list[_Timed]) -> Overheads:
    """Least squares of relative errors over layers, experts, sequences and numbers of activations."""
    experts = shape.layers[0].experts
    assert experts is not None
    rows = [
        (1.0, expected_union(experts.count, experts.per_token, one.tokens), one.sequences, one.tokens * shape.hidden)
        for one in timed
    ]
    seconds = torch.tensor([one.seconds for one in timed], dtype=torch.float64)
    causes = len(shape.layers) * torch.tensor(rows, dtype=torch.float64) / seconds[:, None]
    solved = torch.linalg.lstsq(causes, torch.ones_like(seconds)[:, None]).solution.flatten()
    # A cost that noise made negative is none.
    return Overheads(*(max(1e-12, float(value)) for value in solved))
