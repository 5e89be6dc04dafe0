"""Latent attention against its definition in float64: every head's keys and values made from every latent."""

import pytest
import torch

from moedge.runtime.attention.latent import LatentAttention
from moedge.runtime.attention.protocol import AttentionCall, LatentWeights
from moedge.runtime.engine.sequence import Sequence, pack
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.shape.model_shape import KVGroup

HEADS, KEY, ROTATED, VALUE, LATENT, BLOCK = 3, 12, 6, 10, 32, 8
# Past and new tokens: a whole prompt, one of a single token, chunks, and generated tokens.
CHUNKS = ((0, 21), (0, 1), (13, 9), (40, 2), (30, 1), (7, 1), (63, 1))
TABLES = 16


def weights() -> LatentWeights:
    generator = torch.Generator().manual_seed(3)
    return LatentWeights(torch.randn(HEADS, KEY + VALUE, LATENT, generator=generator) / LATENT**0.5, KEY)


def a_pass(kv: str, tiled: bool) -> tuple[LatentAttention, torch.Tensor, torch.Tensor]:
    """The backend after a pass over CHUNKS whose past was stored, its output, and the output by definition."""
    spec = KVSpec(KVGroup((0,), 1, LATENT, None, ROTATED, HEADS), kv, BLOCK)
    generator = torch.Generator().manual_seed(5)
    offsets = torch.randn(1, 1, LATENT, generator=generator)
    pool = KVPool(spec, len(CHUNKS) * TABLES, key_offsets=offsets, tiled=tiled)
    # What the last owner of a block left there.
    pool.memory.bytes.fill_(255)
    backend, chosen, kept = LatentAttention(KVCache([pool]), torch.float32, tiled), [], []
    for index, (past, count) in enumerate(CHUNKS):
        sequence = Sequence([0] * (past + count), SequenceSampling(1))
        blocks = torch.randperm(TABLES, generator=generator) + index * TABLES
        sequence.table.blocks, sequence.table.num_tokens = [blocks.tolist()], past
        latents, rotated = (torch.randn(past + count, 1, width, generator=generator) for width in (LATENT, ROTATED))
        positions = torch.arange(past)
        pool.write(0, blocks[positions // BLOCK], positions % BLOCK, latents[:past], rotated[:past])
        chosen.append((sequence, count))
        kept.append((latents, rotated, past))
    q = torch.randn(sum(count for _, count in CHUNKS), HEADS, KEY + ROTATED, generator=generator)
    k, v = (torch.cat([one[side][one[2] :] for one in kept]) for side in (0, 1))
    call = AttentionCall(0, 0.3, latent=weights())
    return backend, backend.attend(call, q, k, v, pack(chosen)), by_definition(pool, q, kept)


def by_definition(pool: KVPool, q: torch.Tensor, kept: list[tuple[torch.Tensor, torch.Tensor, int]]) -> torch.Tensor:
    matrix, parts, row = weights().matrix.double(), [], 0
    for latents, rotated, past in kept:
        stored, keys = pool.as_stored(0, latents, rotated)
        latent, shared = pool.restored(0, stored).double()[:, 0], keys.double()[:, 0]
        count = len(latents) - past
        both = torch.einsum("hnr,tr->htn", matrix, latent)
        scores = torch.einsum("qhd,htd->hqt", q[row : row + count, :, :KEY].double(), both[..., :KEY])
        scores += torch.einsum("qhd,td->hqt", q[row : row + count, :, KEY:].double(), shared)
        seen = torch.arange(len(latents)) <= torch.arange(past, past + count)[:, None]
        p = (0.3 * scores).masked_fill(~seen, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqt,htv->qhv", p, both[..., KEY:]))
        row += count
    return torch.cat(parts)


@pytest.mark.parametrize("kv", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("tiled", [False, True])
def test_a_pass_of_everything_is_what_the_definition_gives(kv: str, tiled: bool) -> None:
    backend, found, wanted = a_pass(kv, tiled)
    assert found.shape == (len(found), HEADS, VALUE)
    assert torch.allclose(found.double(), wanted, atol=1e-5)
    prompts = sum(count > 1 for _, count in CHUNKS)
    tokens = sum(count for _, count in CHUNKS) if tiled else sum(count == 1 for _, count in CHUNKS)
    assert (backend.num_expanded, backend.num_absorbed) == (0 if tiled else prompts, tokens)


def test_heads_that_are_expanded_one_by_one_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from moedge.runtime.attention import latent

    whole = a_pass("fp32", False)[1]
    monkeypatch.setattr(latent, "EXPANDED_NBYTES", 1)
    assert [*latent._head_runs(weights(), 100, 4)] == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert torch.allclose(a_pass("fp32", False)[1], whole, atol=1e-6)


def test_latents_take_the_finer_format_and_rotated_keys_are_never_in_4_bits() -> None:
    def formats(kv: str) -> tuple[str, str]:
        layout = KVSpec(KVGroup((0,), 1, 512, None, 64, 128), kv).layout
        return layout.format.keys.name, layout.format.values.name

    assert formats("bf16") == ("bf16", "bf16")
    assert formats("int8") == formats("int8/int4") == ("int8", "int8")
    assert formats("int4") == ("int4", "int8")


def test_sinks_are_refused() -> None:
    """Averages whose weights do not sum to one lose the offset that is added back to them."""
    backend, _, _ = a_pass("fp32", False)
    call = AttentionCall(0, 1.0, sinks=torch.zeros(HEADS), latent=weights())
    sequence = Sequence([0, 0], SequenceSampling(1))
    sequence.table.blocks = [[0]]
    with pytest.raises(UnsupportedModel, match="layer 0: latent attention with sinks"):
        backend.attend(
            call,
            torch.zeros(2, HEADS, KEY + ROTATED),
            torch.zeros(2, 1, LATENT),
            torch.zeros(2, 1, ROTATED),
            pack([(sequence, 2)]),
        )
