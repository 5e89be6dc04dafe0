"""Which tokens an indexer chooses (`runtime/attention/latent.py`), against the definition over whole sequences in
float64.
"""

from dataclasses import replace

import pytest
import torch

from moedge.runtime.attention import latent
from moedge.runtime.attention.latent import TokenChooser
from moedge.runtime.attention.protocol import IndexQuery, PassSlots
from moedge.runtime.engine.sequence import Batch, Sequence, pack
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.shape.model_shape import KVGroup

# Of so many heads one has a positive product: scores of 0 would be equal.
LAYER, HEADS, DIM, COUNT, BLOCK, TABLES = 3, 16, 32, 24, 8, 16
# Past and new tokens: a whole prompt, chunks, generated tokens; sequences of fewer tokens than are chosen, and of more.
CHUNKS = ((0, 61), (13, 9), (40, 30), (7, 1), (90, 1))


def a_pass(kv: str) -> tuple[TokenChooser, Batch, IndexQuery, list[torch.Tensor]]:
    """The chooser with the keys of a pass over CHUNKS and of what was before, and the keys of each sequence."""
    pool = KVPool(KVSpec(KVGroup((LAYER,), 1, DIM, None, chosen=COUNT), kv, BLOCK), len(CHUNKS) * TABLES)
    # What the last owner of a block left there.
    pool.memory.bytes.fill_(255)
    cache, generator = KVCache([pool]), torch.Generator().manual_seed(2)
    chooser = TokenChooser(cache, PassSlots(cache, "cpu"), "cpu")
    packed, kept = [], []
    for index, (past, count) in enumerate(CHUNKS):
        sequence = Sequence([0] * (past + count), SequenceSampling(1))
        blocks = torch.randperm(TABLES, generator=generator) + index * TABLES
        sequence.table.blocks, sequence.table.num_tokens = [blocks.tolist()], past
        keys, positions = torch.randn(past + count, 1, DIM, generator=generator), torch.arange(past)
        pool.write(0, blocks[positions // BLOCK], positions % BLOCK, keys[:past], keys[:past, :, :0])
        packed.append((sequence, count))
        kept.append(keys)
    batch = pack(packed)
    q = torch.randn(batch.num_tokens, HEADS, DIM, generator=generator)
    weights = torch.randn(batch.num_tokens, HEADS, generator=generator)
    fresh = torch.cat([keys[past:] for keys, (past, _) in zip(kept, CHUNKS, strict=True)])
    index = IndexQuery(LAYER, q, fresh, weights, COUNT)
    chooser.store(index, batch)
    return chooser, batch, index, kept


def scores_of(index: IndexQuery, begin: int, past: int, keys: torch.Tensor) -> torch.Tensor:
    """Float64 [rows, tokens], -inf behind each row: sums over heads of weight * relu(query · key)."""
    count = len(keys) - past
    products = torch.einsum("qhd,td->qht", index.q[begin : begin + count].double(), keys[:, 0].double()).relu()
    scores = torch.einsum("qh,qht->qt", index.weights[begin : begin + count].double(), products)
    behind = torch.arange(len(keys)) > torch.arange(past, len(keys)).unsqueeze(1)
    return scores.masked_fill(behind, float("-inf"))


def chosen_sets(positions: torch.Tensor, first: int) -> list[set[int]]:
    """The positions that rows choose among those up to themselves; `first` is the position of the first row."""
    return [{p for p in row if p <= first + i} for i, row in enumerate(positions.tolist())]


@pytest.mark.parametrize("kv", ["fp32", "int8"])
@pytest.mark.parametrize("products", [latent.SCORED_NUMEL, 1])
def test_rows_choose_the_tokens_with_the_highest_scores(
    kv: str, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "SCORED_NUMEL", products)
    chooser, batch, index, kept = a_pass(kv)
    for chunk, (past, count), keys in zip(batch.chunks, CHUNKS, kept, strict=True):
        found = chosen_sets(chooser.choose(index, chunk, range(past, past + count), past + count), past)
        exact = scores_of(index, chunk.begin, past, keys)
        for row, chosen in enumerate(found):
            wanted = set(exact[row].topk(min(COUNT, past + row + 1)).indices.tolist())
            if kv == "fp32":
                assert chosen == wanted
            else:
                # Keys in 8 bits exchange only tokens whose scores are next to each other's.
                assert len(chosen) == len(wanted)
                assert len(chosen - wanted) <= 2
                lost, gained = (exact[row, sorted(part)] for part in (wanted - chosen, chosen - wanted))
                assert not len(lost) or lost.max() - gained.min() < 0.02 * exact[row, : past + row + 1].std() * DIM
    assert chooser.num_chosen == sum(count for _, count in CHUNKS)


def test_rows_of_a_tile_choose_the_same_bits_in_any_chunk() -> None:
    """A tile that begins before its chunk and ends behind it: the row's choice is that of the whole prompt."""
    chooser, batch, index, _ = a_pass("fp32")
    chunk, (past, count) = batch.chunks[2], CHUNKS[2]
    whole = chooser.choose(index, chunk, range(past, past + count), past + count)
    tile = chooser.choose(index, chunk, range(32, 80), 80)
    assert tile.shape == (48, COUNT)
    assert chosen_sets(tile[past - 32 : past - 32 + count], past) == chosen_sets(whole, past)


def test_a_mask_leaves_out_what_is_not_chosen() -> None:
    chooser, batch, index, _ = a_pass("fp32")
    chunk, (past, count) = batch.chunks[0], CHUNKS[0]
    rows = range(past, past + count)
    causal = torch.zeros(count, count).masked_fill_(torch.ones(count, count, dtype=torch.bool).triu_(1), float("-inf"))
    mask = chooser.hide(causal, index, chunk, rows, torch.zeros(1, count, DIM))
    seen = [set(row.nonzero().flatten().tolist()) for row in mask.isfinite()]
    assert seen == chosen_sets(chooser.choose(index, chunk, rows, count), past)
    assert [len(row) for row in seen] == [min(COUNT, row + 1) for row in rows]


def test_layers_without_an_indexer_take_a_choice_as_it_is() -> None:
    """The same query of another layer scores nothing again; a new pass's query does."""
    chooser, batch, index, _ = a_pass("fp32")
    chunk, (past, count) = batch.chunks[4], CHUNKS[4]
    rows = range(past, past + count)
    first = chooser.choose(index, chunk, rows, past + count)
    assert chooser.choose(index, chunk, rows, past + count) is first
    assert chooser.num_chosen == 1
    chooser.choose(replace(index, chosen={}), chunk, rows, past + count)
    assert chooser.num_chosen == 2
