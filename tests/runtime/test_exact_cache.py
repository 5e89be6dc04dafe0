"""The cache (`runtime/kv/`) never shows in the tokens: block size, pool size, neighbours, shared prefixes, preemption,
parking, format.

With `--dtype fp32 --deterministic`. Every variant shows by a counter that what it varies happened.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moedge.quant.kv.format import KV_FORMATS
from moedge.runtime.engine.engine import Engine
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.shape.families import INDEXED, LATENT
from moedge.runtime.source.model_source import ModelSource, open_source

SHARED, NEW_TOKENS, SAMPLES = 70, 12, 2
# Lengths of what follows the shared beginning; 0 is a row of its own.
TAILS = (5, 33, 1, 12, 0)
LONGEST = SHARED + max(TAILS) + NEW_TOKENS


@dataclass(frozen=True)
class Variant:
    """How the cache is made and used. `spare` is how much of the pool is left beside the smallest, None for ample.

    `preempts` says that a small pool must come to that; of few large blocks one sequence may take all but one. `twice`
    adds every prompt once more.
    """

    block: int = 32
    spare: float | None = None
    tokens_per_pass: int = 256
    max_sequences: int = 16
    sharing: bool = True
    parked: bool = False
    preempts: bool = False
    twice: bool = False


AMPLE = Variant()
TIGHT = 0.05
VARIANTS = {
    "blocks of 16": Variant(block=16),
    "blocks of 64": Variant(block=64),
    "no sharing": Variant(sharing=False),
    "two at a time": Variant(max_sequences=2),
    "small passes": Variant(block=16, tokens_per_pass=7),
    "chunks of 16, 3 of 12": Variant(tokens_per_pass=16, max_sequences=3, twice=True),
    "tight": Variant(spare=TIGHT),
    "tight, blocks of 16": Variant(block=16, spare=TIGHT, preempts=True),
    "tight, no sharing": Variant(block=16, spare=TIGHT, sharing=False, preempts=True),
    "tight, parked": Variant(block=16, spare=TIGHT, parked=True, preempts=True),
    "half, blocks of 64": Variant(block=64, spare=0.5, sharing=False),
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    shared = torch.randint(5, 380, (SHARED,), generator=generator).tolist()
    tails = [torch.randint(5, 380, (length or 30,), generator=generator).tolist() for length in TAILS]
    return [(shared if length else []) + tail for length, tail in zip(TAILS, tails, strict=True)]


def rows(*, forked: bool = True) -> list[Sequence]:
    """A greedy sequence of each prompt; the first prompt has samples too, where they are `forked`."""
    greedy = [Sequence(prompt, SequenceSampling(NEW_TOKENS, ignore_eos=True)) for prompt in prompts()]
    params = [SequenceSampling(NEW_TOKENS, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(SAMPLES)]
    greedy[0].forks = forked * [Sequence(greedy[0].prompt_ids, each) for each in params]
    return greedy


def plan_for(source: ModelSource, kv: str, variant: Variant) -> Plan:
    settings = Settings(
        dtype="fp32",
        quant="none",
        kv=kv,
        tokens_per_pass=variant.tokens_per_pass,
        max_sequences=variant.max_sequences,
        deterministic=True,
    )
    plan = make_plan(source.shape, settings, MemoryBudget(4 << 30), Workload(len(TAILS) + SAMPLES, LONGEST))
    specs = [KVSpec(group, kv, variant.block) for group in source.shape.kv_groups]
    blocks = [spec.blocks_for(LONGEST) * (len(TAILS) + SAMPLES) for spec in specs]
    if variant.spare is not None:
        least = [spec.least_blocks(LONGEST) for spec in specs]
        blocks = [count + max(1, int(count * variant.spare)) for count in least]
    parked = [count * 8 * variant.parked for count in blocks]
    return replace(plan, kv_block=variant.block, kv_blocks=tuple(blocks), parked_blocks=tuple(parked))


def generate(source: ModelSource, kv: str, variant: Variant) -> tuple[list[list[int]], Engine]:
    with closing(load_engine(source, plan_for(source, kv, variant))) as loaded:
        engine = loaded.engine
        engine.scheduler.cache.sharing = variant.sharing
        sequences = rows()
        if variant.twice:
            sequences += rows(forked=False)
        everyone = [each for sequence in sequences for each in (sequence, *sequence.forks)]
        for sequence in sequences:
            engine.add(sequence)
        list(engine.run())
    return [sequence.output_ids for sequence in everyone], engine


def mean_sequences(engine: Engine) -> float:
    return engine.metrics.pass_sequences / engine.metrics.passes


def check_happened(variant: Variant, engine: Engine, ample: float) -> None:
    counts, kv = engine.scheduler.counts, engine.metrics.kv
    tight = variant.spare == TIGHT
    if variant.spare is None or variant.preempts:
        assert (counts.preemptions > 0) == variant.preempts
    assert (counts.parked > 0) == variant.parked
    # With sharing, a preempted sequence may find what it stored before.
    assert counts.recomputed_tokens > 0 or not variant.preempts or variant.parked or variant.sharing
    if variant.spare is not None:
        assert mean_sequences(engine) < ample / 2
    forked = SAMPLES * len(prompts()[0])
    if variant.twice:
        assert engine.metrics.pass_sequences <= 3 * engine.metrics.passes
        assert engine.metrics.passes > sum(map(len, prompts())) / 16
    assert (counts.prefix_hit_tokens > forked) == variant.sharing or tight
    assert kv.allocated == engine.metrics.passes * engine.scheduler.cache.nbytes


CODED = [name for name in KV_FORMATS if "int" in name]
# A format is one more loop through the same code: the variants that move blocks most.
CODED_VARIANTS = ("small passes", "tight, blocks of 16", "tight, no sharing", "tight, parked")
# Those that differ in kind, of a model of few layers.
FEW_VARIANTS = (*CODED_VARIANTS, "chunks of 16, 3 of 12", "half, blocks of 64")


@pytest.mark.sample("qwen3_moe-fp32-2 layers")
@pytest.mark.parametrize("sizes", [{"num_hidden_layers": 2}, {}], ids=["2 layers", "all layers"])
@pytest.mark.parametrize(
    ("family", "kv"),
    [
        ("qwen3_moe", "fp32"),
        *((family, kv) for family in ("gpt_oss", "deepseek_v3") for kv in ("fp32", *CODED)),
        *((family, "fp32") for family in sorted(LATENT - {"deepseek_v3"})),
        # Blocks of an indexer hold keys and no values.
        ("deepseek_v32", "int8"),
        # Families whose layers do not hand on the pass, and whose norms are their own.
        ("nemotron", "fp32"),
        ("stablelm", "fp32"),
    ],
)
def test_tokens_do_not_depend_on_the_cache(
    family: str, kv: str, sizes: dict[str, int], checkpoint: Callable[..., Path], stock: Callable[[Path], Any]
) -> None:
    with open_source(str(checkpoint(family, **sizes))) as source:
        wanted, engine = generate(source, kv, AMPLE)
        ample = mean_sequences(engine)
        check_happened(AMPLE, engine, ample)
        for name, variant in VARIANTS.items():
            if name not in (CODED_VARIANTS if kv in CODED else FEW_VARIANTS if sizes else VARIANTS):
                continue
            tokens, engine = generate(source, kv, variant)
            again = [wanted[0], *wanted[1 + SAMPLES :]] if variant.twice else []
            assert tokens == wanted + again, name
            check_happened(variant, engine, ample)
        if family in INDEXED:
            # Rows that do not attend to all tokens before them: most of each prompt, in each of the layers that choose.
            assert engine.model.attention.chooser.num_chosen > sum(map(len, prompts())) / 2
    greedy = [wanted[0], *wanted[1 + SAMPLES :]]
    assert len({tuple(row) for row in wanted}) == len(wanted), "equal rows show nothing"
    if kv == "fp32":
        model = stock(checkpoint(family, **sizes))
        for row, prompt in zip(greedy, prompts(), strict=True):
            # An end of sequence is a token like others; the least number of new tokens would keep it from being chosen.
            stock_ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, eos_token_id=-1, do_sample=False
            )
            assert row == stock_ids[0, len(prompt) :].tolist()
