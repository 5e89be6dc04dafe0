"""Fixed costs of passes beside matmuls, measured with the bundled small model for the machine profile.

Its products are as good as nothing, so what is left is Python, torch's dispatch, threads that meet, and elementwise
work: the same code as in any model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ...moe.expected_rows import expected_union
from ...offload.machine.profile import Overheads
from ..engine.engine import Engine
from ..engine.sequence import Sequence
from ..loading.engine_loader import load_engine
from ..loading.prepare import prepare
from ..plan.placement import RING_EXPERTS, Placement, Plan, Workload, largest_expert
from ..plan.planner import make_plan
from ..sampling.params import SamplingParams
from ..settings.budgets import Budgets, MemoryBudget
from ..settings.settings import Settings
from ..shape.model_shape import ModelShape
from ..shape.shards import model_shards
from ..source.model_source import ModelSource, open_source

# Sequences and prompt tokens of each: enough kinds of passes to tell the four costs apart.
KINDS = ((1, 16), (8, 16), (48, 16), (64, 64))
TOKENS = 4096
DECODED = 8
_BUDGET_NBYTES = 2 << 30
LEAST_S = 1e-12


@dataclass(frozen=True, slots=True)
class Timed:
    """One pass: its tokens, the sequences in it, whether experts streamed, and its seconds."""

    tokens: int
    sequences: int
    streamed: bool
    seconds: float


def measure_overheads() -> Overheads:
    """Measures for about six seconds on the CPU; uses the disk of temporary files."""
    with as_file(files("moedge.demo")) as bundle, open_source(str(bundle / "model")) as source:
        most = max(count for count, _ in KINDS)
        settings = Settings(quant="none", tokens_per_pass=TOKENS, max_sequences=most)
        plan = make_plan(source.shape, settings, MemoryBudget(_BUDGET_NBYTES), Workload(most, 128))
        timed = list(timed_passes(source, plan, None))
        with TemporaryDirectory(prefix="moedge-overheads-") as folder:
            store = Path(folder, "store")
            prepare(source, store, plan.quant, plan.dtype, Budgets())
            timed += timed_passes(source, streaming(source.shape, plan), store)
    return solve(source.shape, timed)


def streaming(shape: ModelShape, plan: Plan) -> Plan:
    """The same with every expert streamed, through a ring so large that nothing waits."""
    shards = model_shards(shape, plan.quant, plan.dtype)
    ring = RING_EXPERTS * largest_expert(shards)
    return replace(plan, placement=Placement(len(shards.layers), (0,) * len(shards.layers), 0, ring))


def timed_passes(source: ModelSource, plan: Plan, store: Path | None) -> Iterator[Timed]:
    with closing(load_engine(source, plan, store)) as loaded:
        # Prompts are the same each time: found in the cache, hardly a token of them would be computed.
        loaded.engine.scheduler.cache.sharing = False
        for kind in KINDS:
            _passes(loaded.engine, source.shape, *kind)
        for kind in KINDS:
            for tokens, seconds in _passes(loaded.engine, source.shape, *kind):
                yield Timed(tokens, kind[0], plan.streams, seconds)


def _passes(engine: Engine, shape: ModelShape, count: int, length: int) -> list[tuple[int, float]]:
    """Tokens and seconds of the first pass, and of the middle one of those that decode."""
    generator = torch.Generator().manual_seed(count)
    for _ in range(count):
        prompt = torch.randint(1, shape.vocab, (length,), generator=generator).tolist()
        engine.add(Sequence(prompt, SamplingParams(DECODED, ignore_eos=True)))
    engine.start_counting()
    timed = []
    while engine.busy:
        before, begun = engine.metrics.pass_tokens, time.perf_counter()
        engine.step()
        timed.append((engine.metrics.pass_tokens - before, time.perf_counter() - begun))
    decoding = sorted(timed[1:], key=lambda one: one[1])
    return [timed[0], decoding[len(decoding) // 2]]


def solve(shape: ModelShape, timed: list[Timed]) -> Overheads:
    """Least squares of relative errors over layers, experts, sequences and tokens where nothing streams;
    what passes take longer that stream is put down to arrivals."""
    held, streamed = ([one for one in timed if one.streamed == kind] for kind in (False, True))
    causes, seconds = _causes(shape, held), _seconds(held)
    solved = torch.linalg.lstsq(causes / seconds[:, None], torch.ones_like(seconds)[:, None]).solution.flatten()
    # A cost that noise made negative is none.
    solved = solved.clamp(min=LEAST_S)
    causes = _causes(shape, streamed)
    longer = (_seconds(streamed) - causes @ solved) / causes[:, 1]
    layer_s, expert_s, sequence_s, token_s = solved.tolist()
    return Overheads(layer_s, expert_s, sequence_s, token_s, max(LEAST_S, longer.median().item()))


def _causes(shape: ModelShape, timed: list[Timed]) -> torch.Tensor:
    """[passes, 4] of layers, experts that are wanted, sequences and tokens, over all layers."""
    experts = shape.layers[0].experts
    assert experts is not None
    rows = [
        (1.0, expected_union(experts.count, experts.per_token, one.tokens), one.sequences, one.tokens) for one in timed
    ]
    return len(shape.layers) * torch.tensor(rows, dtype=torch.float64)


def _seconds(timed: list[Timed]) -> torch.Tensor:
    return torch.tensor([one.seconds for one in timed], dtype=torch.float64)
