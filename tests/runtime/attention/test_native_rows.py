"""The CPU kernels of attention agree with float64 over the same codes, and a row's bits depend on that row alone."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.quant.kv.format import KV_FORMATS
from moedge.quant.matmul.thread_pool import WorkerPool
from moedge.quant.native import library
from moedge.quant.native.build import SETS
from moedge.runtime.attention.native_rows import RowAttention, RowPlan, RowQuery, Stored
from moedge.runtime.attention.protocol import AttentionCall
from moedge.runtime.engine.sequence import Sequence, pack
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.shape.model_shape import KVGroup
from support.kernels.attention_setup import FEATURES, NativeSetup, worst
from support.kernels.native_rows import Rows

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.skipif(not library.available(), reason=f"no library of CPU kernels: {library.lack()}"),
]
SHAPES = [(2, 2, 64), (8, 2, 80), (5, 1, 96), (16, 1, 128), (4, 2, 256)]
# Errors allowed in float32, and where products are of bfloat16: queries, weights and results have 8 bits.
EXACT, ROUNDED = 3e-6, 8e-3


@pytest.fixture(params=list(SETS))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Lets the kernels use one instruction set; skips those that this processor lacks."""
    loaded = library.loaded()
    assert loaded.library is not None
    if list(SETS).index(request.param) > list(SETS).index(loaded.isa):
        pytest.skip(f"the processor, or MOEDGE_ISA, ends at {loaded.isa}")
    assert library.choose(loaded.library, request.param) == request.param
    yield request.param
    library.choose(loaded.library, loaded.isa)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_instruction_set_agrees_with_float64(isa: str, dtype: torch.dtype, kv_format: str) -> None:
    most = EXACT if dtype == torch.float32 else ROUNDED
    for shape in SHAPES:
        rows = Rows.make(shape, kv_format, [1, 40, 257, 700], 16, dtype)
        assert error(rows.run(), rows.wanted()) < most, shape


def test_queries_need_not_be_contiguous() -> None:
    """Partial rotary embeddings end in a concatenation, after which heads come before tokens in memory."""

    wanted, turned = (NativeSetup((8, 2, 64), "fp32") for _ in range(2))
    attend = turned.attention.attend

    def attend_turned(call: AttentionCall, q: torch.Tensor, *others: Any) -> torch.Tensor:
        return attend(call, q.transpose(0, 1).contiguous().transpose(0, 1), *others)

    turned.attention.attend = attend_turned  # type: ignore[method-assign]
    # Generated tokens after a prompt.
    pairs = zip(turned.run(1000, last=2), wanted.run(1000, last=2), strict=True)
    assert all(torch.allclose(found, right, atol=1e-5) for found, right in pairs)


# `test_any_shape_agrees_with_float64` draws all of these, for rows on their own.
@pytest.mark.sample("int8-chunk", "int4-all")
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("kv_format", ["fp32", "int8", "int4"])
def test_chunks_and_features_agree_with_float64(kv_format: str, name: str) -> None:
    """Deterministic rows of prompts are computed by the kernels too, several of a sequence at once."""
    for chunk, tiled in ((1, False), (9, False), (200, True), (9, True)):
        setup = NativeSetup((8, 2, 80), kv_format, tiled, name)
        assert worst(setup.run(chunk), setup.wanted()) < EXACT, (chunk, tiled)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_agrees_with_float64(data: st.DataObject) -> None:
    """Odd sizes, one token, blocks of any size, windows within and beyond the past, sinks, softcap."""
    draw, dtype = data.draw, data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 19))
    dim = draw(st.integers(1, 70)) * 2
    lengths = draw(st.lists(st.sampled_from([1, 2, 15, 16, 17, 33, 255, 256, 257, 300]), min_size=1, max_size=4))
    sinks = torch.linspace(-3, 3, kv_heads * group) if draw(st.booleans()) else None
    asked = {"softcap": draw(st.sampled_from([None, 3.0])), "sinks": sinks}
    asked[draw(st.sampled_from(["window", "chunk"]))] = draw(st.sampled_from([None, 1, 7, 40, 1000]))
    block = draw(st.sampled_from([1, 3, 16, 32, 100]))
    rows = Rows.make(
        (kv_heads * group, kv_heads, dim), draw(st.sampled_from(KV_FORMATS)), lengths, block, dtype, **asked
    )
    most = {torch.float32: EXACT, torch.float16: 1e-3, torch.bfloat16: 2 * ROUNDED}[dtype]
    assert error(rows.run(threads=draw(st.integers(1, 3))), rows.wanted()) < most


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_row_has_the_same_bits_with_any_threads_and_neighbours(dtype: torch.dtype, kv_format: str) -> None:
    """Pasts are split where rows are few and not where they are many: the bits do not show it."""
    rows = Rows.make((10, 2, 96), kv_format, [700, 3, 520, *range(100, 140)], 32, dtype, softcap=9.0)
    together = rows.run(threads=1)
    for chosen in ([0], [2, 0], [1, 2, 3]):
        for threads in (1, 2, 5):
            assert torch.equal(rows.run(chosen, threads), together[chosen])
    assert torch.equal(rows.run(threads=3), together)


def in_both(run: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What `run` returns with registers, then with the tiles of AMX; skips where the processor has none."""
    loaded = library.loaded()
    assert loaded.library is not None
    if loaded.isa != "amx":
        pytest.skip(f"the processor, or MOEDGE_ISA, ends at {loaded.isa}")
    library.choose(loaded.library, "avx512bf16")
    try:
        in_registers = run()
    finally:
        library.choose(loaded.library, loaded.isa)
    return in_registers, run()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_tiles_give_the_bits_of_registers(data: st.DataObject) -> None:
    """Sums of integers are exact, and what follows them has the same order."""
    draw, kv_heads, group = data.draw, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 19))
    dim = draw(st.sampled_from([2, 30, 64, 80, 96, 128, 130, 256, 400]))
    lengths = draw(st.lists(st.sampled_from([1, 15, 16, 33, 255, 257, 300, 600]), min_size=1, max_size=3))
    asked = {"softcap": draw(st.sampled_from([None, 3.0])), "window": draw(st.sampled_from([None, 1, 40, 300]))}
    block, kv_format = draw(st.sampled_from([1, 5, 16, 32, 100])), draw(st.sampled_from(["int8", "int8/int4", "int4"]))
    shape = (kv_heads * group, kv_heads, dim)
    rows, threads = Rows.make(shape, kv_format, lengths, block, torch.bfloat16, **asked), draw(st.integers(1, 2))
    in_registers, in_tiles = in_both(lambda: [rows.run(threads=threads)])
    assert torch.equal(in_registers[0], in_tiles[0])


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("kv_format", ["int8", "int4"])
def test_tiles_give_the_bits_of_registers_to_several_rows_of_a_sequence(kv_format: str, name: str) -> None:
    in_registers, in_tiles = in_both(
        lambda: NativeSetup((8, 2, 80), kv_format, True, name, dtype=torch.bfloat16).run(200)
    )
    assert all(torch.equal(a, b) for a, b in zip(in_registers, in_tiles, strict=True))


@pytest.mark.sample("fp32-chunk", "bf16-all")
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_deterministic_rows_have_the_same_bits_in_every_chunking_and_block_size(dtype: torch.dtype, name: str) -> None:
    for kv_format in ("bf16", "int8", "int4"):
        wanted = NativeSetup((8, 2, 64), kv_format, True, name, dtype=dtype).run(200)
        for block, chunk, together in ((16, 1, True), (64, 5, False), (32, 50, False)):
            outs = NativeSetup((8, 2, 64), kv_format, True, name, block, dtype).run(chunk, together)
            assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True)), (kv_format, block, chunk)


def test_latents_are_keys_of_two_parts_and_values() -> None:
    """The absorbed form: scores are the sum over latents and rotated keys, sums are of latents."""
    generator = torch.Generator().manual_seed(2)
    spec = KVSpec(KVGroup((0,), 1, 96, None, 24, 5), "fp32", 16)
    pool = KVPool(spec, 20)
    latents, rotated = torch.randn(300, 1, 96, generator=generator), torch.randn(300, 1, 24, generator=generator)
    at = torch.arange(300)
    pool.write(0, at // 16, at % 16, latents, rotated)
    sequence = Sequence([0] * 300, SequenceSampling(1))
    sequence.table.blocks, sequence.table.num_tokens = [list(range(19))], 299
    rows = RowAttention(KVCache([pool]), torch.float32, WorkerPool(2))
    call, q = AttentionCall(0, 0.1), torch.randn(1, 5, 120, generator=generator)
    plan = rows.plan(call, pack([(sequence, 1)]), 0, "gathered")
    assert isinstance(plan, RowPlan)
    out = torch.empty(1, 5, 96)
    keys = [Stored(*side) for side in zip(pool.planes(0), pool.formats, strict=True)]
    rows.attend(RowQuery(call, q), keys, keys[0], plan, out)
    both = torch.cat([latents, rotated], -1)[:, 0].double()
    wanted = (q[0].double() @ both.T * 0.1).softmax(-1) @ latents[:, 0].double()
    assert error(out[0], wanted) < EXACT


@pytest.mark.parametrize("kv_format", ["bf16", "int8", "int4"])
def test_what_is_not_finite_shows_in_its_own_rows_only(kv_format: str) -> None:
    """A sequence whose keys or values are not finite ends with an error; its neighbours go on."""
    for side in (0, 1):
        rows = Rows.make((4, 1, 64), kv_format, [40, 300], 16, torch.bfloat16)
        planes = rows.pool.planes(0)[side]
        damaged = planes.codes if planes.scales is None else planes.scales
        damaged[rows.sequences[0].table.blocks[0][1]] = float("nan")
        out = rows.run()
        assert out[0].isnan().all()
        assert out[1].isfinite().all()
