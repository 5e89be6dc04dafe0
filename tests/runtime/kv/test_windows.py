"""Layers with a window give back what lies behind it (`runtime/kv/cache.py`): the bytes that this frees, on models with
such layers.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.kv.allocator import NO_BLOCK
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source

LENGTH, SEQUENCES, TOKENS_PER_PASS = 400, 2, 64


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3_text"])
def test_windowed_layers_hold_the_window_and_their_pool_is_smaller(
    family: str, checkpoint: Callable[[str], Path]
) -> None:
    settings = Settings(dtype="fp32", quant="none", kv="fp32", tokens_per_pass=TOKENS_PER_PASS, max_sequences=SEQUENCES)
    with open_source(str(checkpoint(family))) as source:
        plan = make_plan(source.shape, settings, MemoryBudget(4 << 30), Workload(SEQUENCES, LENGTH))
        groups = source.shape.kv_groups
        (full,) = (index for index, group in enumerate(groups) if group.window is None)
        (windowed,) = (index for index, group in enumerate(groups) if group.window is not None)
        assert plan.kv_block == 16
        assert plan.kv_blocks[full] == SEQUENCES * 25
        # 16 tokens of window lie in at most two blocks; a pass takes four more.
        assert plan.kv_blocks[windowed] == SEQUENCES * 2 + 4
        with closing(load_engine(source, plan)) as loaded:
            engine = loaded.engine
            sequences = [Sequence([first] * (LENGTH - 40), SequenceSampling(40, ignore_eos=True)) for first in (7, 8)]
            for sequence in sequences:
                engine.add(sequence)
            held = [0, 0]
            while engine.busy:
                engine.step()
                tables = [sequence.table for sequence in engine.scheduler.running]
                for index in (full, windowed):
                    blocks = sum(block_id != NO_BLOCK for table in tables for block_id in table.blocks[index])
                    held[index] = max(held[index], blocks)
                    assert blocks == engine.scheduler.cache.groups[index].allocator.num_live
            assert engine.scheduler.counts.preemptions == 0
            pools = engine.scheduler.cache.pools
    assert held[full] == SEQUENCES * 25
    assert held[windowed] <= SEQUENCES * 2
    freed = (held[full] - held[windowed]) * pools[windowed].spec.block_nbytes
    everything = held[full] * sum(pool.spec.block_nbytes for pool in pools)
    share = len(groups[windowed].layers) / sum(len(group.layers) for group in groups)
    assert freed / everything == pytest.approx(share * 46 / 50)
