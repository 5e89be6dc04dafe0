"""Models whose indexers choose blocks of keys (`runtime/attention/blocks.py`), by choices and by tokens: contexts are
longer than what is chosen, prompts are cut, shared, preempted and forked, and each of these is counted.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moedge.runtime.attention import blocks as choices
from moedge.runtime.attention.blocks import BlockAttention, HeadBlockChooser
from moedge.runtime.attention.protocol import AttentionCall, BlockQuery, PassSlots
from moedge.runtime.engine.sequence import Sequence, pack
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.families import BLOCK_SPARSE, text_name
from moedge.runtime.shape.model_shape import KVGroup
from moedge.runtime.source.model_source import open_source
from support.family_run import NEW_TOKENS, prompts
from support.installed_transformers import installed
from support.tiny_families import BLOCKS

KEPT = BLOCKS["index_block_size"] * BLOCKS["index_topk_blocks"]
# The last row begins as the one before it, behind which it is admitted.
ROWS = [*([384 - token for token in ids] for ids in prompts()[1:4]), *prompts()[4:], *prompts()[:4]]
ROWS.append(ROWS[-1][:64] + ROWS[1][:9])


def load(folder: Path, *, blocks: int | None = None, **settings: Any) -> LoadedEngine:
    chosen: dict[str, Any] = {"dtype": "fp32", "quant": "none", "kv": "fp32"} | settings
    with open_source(str(folder)) as source:
        job = Workload(len(ROWS), max(map(len, ROWS)) + NEW_TOKENS)
        plan = make_plan(source.shape, Settings(**chosen), MemoryBudget(4 << 30), job)
        if blocks is not None:
            plan = replace(plan, kv_blocks=(blocks,) * len(plan.kv_blocks), kv_block=4)
        return load_engine(source, plan)


def sequences_of(rows: list[list[int]], **sampling: Any) -> list[Sequence]:
    return [Sequence(ids, SequenceSampling(NEW_TOKENS, **sampling), frozenset({2})) for ids in rows]


def run(loaded: LoadedEngine, sequences: list[Sequence]) -> list[list[int]]:
    for sequence in sequences:
        loaded.engine.add(sequence)
    list(loaded.engine.run())
    return [sequence.output_ids for sequence in sequences]


WAYS: dict[str, dict[str, Any]] = {
    "whole": {"tokens_per_pass": 1024, "max_sequences": 16},
    "chunks": {"tokens_per_pass": 16, "max_sequences": 3},
    "preempted": {"tokens_per_pass": 48, "max_sequences": 8, "blocks": 26},
}


@pytest.mark.sample("preempted-True-minimax_m3_vl_text")
@pytest.mark.parametrize("family", installed(sorted(BLOCK_SPARSE)))
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_transformers(
    way: str, deterministic: bool, family: str, checkpoint: Callable[[str], Path], stock: Callable[[Path], Any]
) -> None:
    folder = checkpoint(family)
    with closing(load(folder, deterministic=deterministic, **WAYS[way])) as loaded:
        # What a preempted sequence computed must be computed again, not found in blocks that it gave back.
        loaded.engine.scheduler.cache.sharing = way != "preempted"
        found = run(loaded, sequences_of(ROWS))
        counts, backend = loaded.engine.scheduler.counts, loaded.model.attention
        assert isinstance(backend, BlockAttention)
        # Two layers choose; all tokens behind the first KEPT do, once at least.
        late = sum(max(0, len(ids) + len(tokens) - 1 - KEPT) for ids, tokens in zip(ROWS, found, strict=True))
        assert backend.head_chooser.num_chosen >= 2 * (late - counts.prefix_hit_tokens) > 0
        assert (counts.preemptions > 0) == (counts.recomputed_tokens > KEPT) == (way == "preempted")
        assert (counts.prefix_hit_tokens > 0) >= (way == "chunks")
    model = stock(folder)
    for ids, tokens in zip(ROWS, found, strict=True):
        wanted = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        assert tokens == wanted[0, len(ids) :].tolist()
    assert len({token for row in found for token in row}) > 20, "equal tokens show nothing"


@pytest.mark.parametrize("deterministic", [False, True])
def test_samples_of_a_prompt_choose_by_the_same_keys(deterministic: bool, checkpoint: Callable[[str], Path]) -> None:
    found, rows = [], [ROWS[1], ROWS[3]]
    for forked in (False, True):
        with closing(load(checkpoint("minimax_m3_vl_text"), deterministic=deterministic)) as loaded:
            first, *others = (sequences_of(rows, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(3))
            for index, sequence in enumerate(first):
                sequence.forks = [each[index] for each in others] if forked else []
            for sequence in [*first] if forked else [each for some in (first, *others) for each in some]:
                loaded.engine.add(sequence)
            list(loaded.engine.run())
            if forked:
                assert loaded.engine.scheduler.counts.prefix_hit_tokens >= 2 * sum(map(len, rows))
            found.append([each.output_ids for some in (first, *others) for each in some])
    assert found[0] == found[1]
    assert found[0][:2] != found[0][2:4]


@pytest.mark.parametrize("deterministic", [False, True])
def test_blocks_that_an_indexer_does_not_choose_are_left_out(
    deterministic: bool, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: attention to all tokens gives others."""
    found = []
    for leaves_out in (AttentionCall.leaves_out, lambda self, length: False):
        monkeypatch.setattr(AttentionCall, "leaves_out", leaves_out)
        with closing(load(checkpoint("minimax_m3_vl_text"), deterministic=deterministic)) as loaded:
            found.append(run(loaded, sequences_of(ROWS[-1:])))
    assert found[0] != found[1]


# Past and new tokens: a whole prompt, chunks, a generated token; ends of blocks and the middle of one.
CHUNKS = ((0, 61), (13, 9), (40, 30), (62, 1), (90, 1))
LAYER, HEADS, DIM, BLOCK = 3, 2, 24, 8


def a_pass(local: int) -> tuple[HeadBlockChooser, Any, BlockQuery, list[torch.Tensor]]:
    """The chooser with the keys of a pass over CHUNKS and of what was before, and the keys of each sequence."""
    sizes = {"block": 7, "blocks": 3, "local": local}
    pool = KVPool(KVSpec(KVGroup((LAYER,), 1, DIM, None, chosen=21), "fp32", BLOCK), len(CHUNKS) * 16)
    # What the last owner of a block left there.
    pool.memory.bytes.fill_(255)
    cache, generator = KVCache([pool]), torch.Generator().manual_seed(2)
    chooser = HeadBlockChooser(cache, PassSlots(cache, "cpu"), "cpu")
    packed, kept = [], []
    for index, (past, count) in enumerate(CHUNKS):
        sequence = Sequence([0] * (past + count), SequenceSampling(1))
        table = torch.randperm(16, generator=generator) + index * 16
        sequence.table.blocks, sequence.table.num_tokens = [table.tolist()], past
        keys, positions = torch.randn(past + count, 1, DIM, generator=generator), torch.arange(past)
        pool.write(0, table[positions // BLOCK], positions % BLOCK, keys[:past], keys[:past, :, :0])
        packed.append((sequence, count))
        kept.append(keys)
    batch = pack(packed)
    fresh = torch.cat([keys[past:] for keys, (past, _) in zip(kept, CHUNKS, strict=True)])
    index = BlockQuery(LAYER, torch.randn(batch.num_tokens, HEADS, DIM, generator=generator), fresh, **sizes)
    chooser.store(index, batch)
    return chooser, batch, index, kept


def defined(q: torch.Tensor, keys: torch.Tensor, position: int, index: BlockQuery) -> set[int]:
    """The blocks that a query [D] of one head chooses of keys [L, D], in float64."""
    products = (keys[: position + 1].double() @ q.double()).tolist()
    own = position // index.block
    scores = {block: max(products[block * index.block :][: index.block]) for block in range(own + 1)}
    scores |= {max(0, own - step): float("inf") for step in range(index.local)}
    return set(sorted(scores, key=lambda block: -scores[block])[: index.blocks])


@pytest.mark.parametrize("local", [0, 1, 2])
@pytest.mark.parametrize("products", [choices.SCORED_NUMEL, 1])
def test_each_head_chooses_the_blocks_of_the_largest_products(
    products: int, local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "SCORED_NUMEL", products)
    chooser, batch, index, kept = a_pass(local)
    for chunk, (past, count), keys in zip(batch.chunks, CHUNKS, kept, strict=True):
        found = chooser.blocks(index, chunk, range(past, past + count), past + count)
        for head in range(HEADS):
            for row in range(count):
                wanted = defined(index.q[chunk.begin + row, head], keys[:, 0], past + row, index)
                assert set(found[head, row].nonzero().flatten().tolist()) == wanted
    assert chooser.num_chosen == sum(count for _, count in CHUNKS)


def test_rows_of_a_tile_choose_the_same_blocks_in_any_chunk() -> None:
    chooser, batch, index, _ = a_pass(1)
    chunk, (past, count) = batch.chunks[2], CHUNKS[2]
    whole = chooser.blocks(index, chunk, range(past, past + count), past + count)
    tile = chooser.blocks(index, chunk, range(32, 80), 128)[:, past - 32 : past - 32 + count]
    assert torch.equal(tile[..., : whole.shape[-1]], whole)
    assert not tile[..., whole.shape[-1] :].any()


def test_makers_files_say_the_same_in_fields_of_their_own() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    inner = {
        "use_sparse_attention": True, "sparse_num_index_heads": 2, "sparse_index_dim": 24, "sparse_block_size": 7,
        "sparse_topk_blocks": 3, "sparse_local_block": 2, "sparse_attention_freq": [0, 1, 1, 0],
    }  # fmt: skip
    values = {
        "num_hidden_layers": 4, "num_key_value_heads": 2, "hidden_act": "swigluoai", "moe_layer_freq": [0, 1, 1, 1],
        "sparse_attention_config": inner,
    }  # fmt: skip
    theirs = CONFIG_MAPPING["minimax_m3_vl_text"](**values)
    found = ModelConfig({"model_type": "minimax_m3_vl", "text_config": values})
    for name in ("layer_types", "mlp_layer_types", "index_n_heads", "index_head_dim", "index_block_size"):
        assert found.get(name) == getattr(theirs, name), name
    assert (found.get("index_topk_blocks"), found.get("index_local_blocks")) == (3, 2)
    with pytest.raises(UnsupportedModel, match="index_n_heads is 2, wanted num_key_value_heads 4"):
        ModelConfig({"model_type": "minimax_m3_vl", "text_config": values | {"num_key_value_heads": 4}})
    more = values | {"sparse_attention_config": inner | {"sparse_local_block": 4}}
    with pytest.raises(UnsupportedModel, match="index_local_blocks is 4, wanted at most index_topk_blocks 3"):
        ModelConfig({"model_type": "minimax_m3_vl", "text_config": more})


def test_layers_that_predict_further_tokens_are_no_layers_of_the_model() -> None:
    assert text_name("language_model.model.mtp.layers.0.self_attn.q_proj.weight") is None
    assert text_name("language_model.model.layers.0.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"
