"""Matrices in order `tiles`, and the kernels that multiply by them without dequantizing them first."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moedge.moe.expert import ExpertBody, ExpertWeights, HeldExperts, group_by_expert, mix_experts
from moedge.moe.routing_stats import RoutingStats
from moedge.quant.formats.format import FORMATS, INTEGER_CODES, ROWS, TILES, get_format
from moedge.quant.kernels.operands import ACTIVATIONS, Gate
from moedge.quant.matmul import tiled
from moedge.quant.matmul.matmul import ALL_ROWS, Matmul, ParallelMatmul, Workspace, kernel_order
from moedge.quant.native import calls, library
from moedge.quant.scratch import row_nbytes
from moedge.quant.tensor import PackedTensor, pack
from support.kernels.relayout import from_planes, planes_of, relayout
from support.native_driver import DRIVERS, SANITIZERS, build_driver, run_driver
from support.published_widths import ODD_WIDTHS, widths
from support.random_planes import defined, random_planes

pytestmark = pytest.mark.numerics

NAMES = sorted(name for name, each in FORMATS.items() if TILES in each.orders)
INTEGERS = [name for name in NAMES if FORMATS[name].reads_integers]
# Rounding of a bfloat16 result, and of nf4's levels to bfloat16.
TOLERANCE = 5e-3
needs_library = pytest.mark.skipif(not tiled.has_kernel(), reason="the library of CPU kernels is not usable here")


def matmul(threads: int = 2, deterministic: bool = True, **options: object) -> ParallelMatmul:
    helpers = [Workspace(1 << 20) for _ in range(threads - 1)]
    return ParallelMatmul(Workspace(1 << 20), deterministic, helpers=helpers, **options)  # type: ignore[arg-type]


def rows_of(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


def error_of(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", NAMES)
def test_tiles_hold_the_same_planes_in_as_many_bytes(name: str) -> None:
    planes = random_planes(get_format(name), (128, 512))
    packed = from_planes(name, planes, "bfloat16", TILES)
    assert packed.layout.order == TILES
    assert packed.nbytes == get_format(name).nbytes((128, 512), "bfloat16")
    assert torch.equal(packed.dequantize(), from_planes(name, planes, "bfloat16").dequantize())
    for mine, back in zip(planes, planes_of(packed), strict=True):
        assert mine is back or torch.equal(mine, back)
    whole, part = packed.dequantize(), PackedTensor(packed.layout, packed.rows(slice(32, 96)))
    assert torch.equal(relayout(packed, ROWS).dequantize(), whole)
    assert torch.equal(PackedTensor(get_format(name).in_order(TILES).layout((64, 512), "bfloat16"), part.planes)
                       .dequantize(), whole[32:96])  # fmt: skip


@pytest.mark.parametrize("name", ["int8", "nf4", "int4", "mxfp4", "int3", "vq2"])
def test_matrices_without_whole_tiles_keep_the_order_of_their_format(name: str) -> None:
    assert pack(rows_of(40, 128), name, TILES).layout == pack(rows_of(40, 128), name).layout
    assert get_format("int8").in_order(TILES).layout((64, 48), "bfloat16").order == ROWS
    assert get_format(name).order == ROWS


@pytest.mark.parametrize("name", ["int4", "int8", "nf4", "mxfp4", "int3", "vq2"])
def test_quantizing_into_tiles_gives_the_codes_of_the_format_s_own_order(name: str) -> None:
    weight = rows_of(192, 256)
    assert torch.equal(pack(weight, name, TILES).dequantize(), pack(weight, name).dequantize())


@pytest.mark.parametrize("name", NAMES)
def test_products_agree_with_float64_and_rows_with_themselves(name: str, isa: str) -> None:
    planes = random_planes(get_format(name), (64, 512), seed=len(name))
    packed, exact = from_planes(name, planes, "bfloat16", TILES), defined(get_format(name), planes)
    x, compute = rows_of(150, 512), matmul()
    whole = compute.linear(x, packed)
    assert error_of(whole, x.double() @ exact.t()) < TOLERANCE
    for first, count in ((0, 1), (3, 2), (1, 7), (20, 13), (0, 25), (5, 129)):
        part = slice(first, first + count)
        assert torch.equal(compute.linear(x[part], packed), whole[part]), (isa, count)


@needs_library
@pytest.mark.parametrize("octaves", [7, 40])
@pytest.mark.parametrize("name", INTEGERS)
def test_inputs_of_many_magnitudes_keep_the_bits_that_are_promised(name: str, octaves: int, isa: str) -> None:
    # With AVX2 alone an input is an integer of 16 bits times a power of two of its chunk (quant/native/tiles_words.h).
    planes = random_planes(get_format(name), (64, 576 if FORMATS[name].group in (None, 32, 64) else 512), seed=7)
    packed, exact = from_planes(name, planes, "bfloat16", TILES), defined(get_format(name), planes)
    generator = torch.Generator().manual_seed(octaves)
    x = rows_of(9, exact.shape[1]).sign() * 2.0 ** torch.randint(-octaves, 0, (9, exact.shape[1]), generator=generator)
    x = (x * (1 + torch.randint(0, 128, x.shape, generator=generator) / 128)).bfloat16()
    wide, weights = x.double(), exact.abs().t()
    largest = wide.abs().view(9, -1, 32).amax(2, keepdim=True).expand(9, -1, 32).reshape(9, -1)
    # Down to a 128th of the largest of its chunk, all bits of a number; of a smaller one, what its chunk's unit leaves.
    lost = (largest * 2**-15 * (wide.abs() < largest / 128)) @ weights
    rounding = 2**-8 * (wide @ exact.t()).abs() + 2**-19 * (wide.abs() @ weights)
    error = (matmul().linear(x, packed).double() - wide @ exact.t()).abs()
    assert bool((error <= lost + rounding).all())
    assert (octaves > 7) == bool(lost.any())


@needs_library
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", INTEGERS)
def test_a_number_that_is_not_finite_stays_in_its_row(name: str, wrong: float, isa: str) -> None:
    packed, x = from_planes(name, random_planes(get_format(name), (64, 512)), "bfloat16", TILES), rows_of(5, 512)
    right = matmul().linear(x, packed)
    x[2, 70] = wrong
    found = matmul().linear(x, packed)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3, 4]], right[[0, 1, 3, 4]])


@pytest.mark.parametrize("name", NAMES)
def test_widening_by_the_library_has_the_bits_of_the_codec(
    name: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes = random_planes(get_format(name), (128, 512), seed=len(name))
    packed = from_planes(name, planes, "bfloat16", TILES)
    if get_format(name).scales == "e8m0":
        # Powers that are no normal numbers, that overflow, and NaN.
        packed.planes[1].view(-1)[::7] = torch.arange(256, dtype=torch.uint8).repeat(2)[
            : packed.planes[1].numel() // 7 + 1
        ]
    found = torch.full((130, 512), 7, dtype=torch.bfloat16)
    assert calls.widen_tiles(packed.layout.codes, packed.planes, found[1:129])
    assert (found[[0, 129]] == 7).all()
    monkeypatch.setattr(calls, "widen_tiles", lambda *_: False)
    wanted = packed.dequantize(torch.empty(packed.shape, dtype=torch.bfloat16))
    assert torch.equal(wanted.isnan(), found[1:129].isnan())
    same = wanted.view(torch.int16) == found[1:129].view(torch.int16)
    assert (same | wanted.isnan()).all(), (isa, int((~same).sum()))


@needs_library
def test_what_the_library_does_not_widen_is_left_to_the_codec() -> None:
    packed = pack(rows_of(64, 128), "int4", TILES)
    for out in (torch.empty(64, 128), torch.empty(128, 64, dtype=torch.bfloat16).t()):
        assert not calls.widen_tiles("int4", packed.planes, out)
    assert torch.equal(packed.dequantize(torch.empty(64, 128)).bfloat16(), packed.dequantize())


def rounded(x: Tensor) -> Tensor:
    """Each 32 columns of a row as integers of 8 bits times their scale: what `integer` makes of activations."""
    chunks = x.double().reshape(len(x), x.shape[1] // 32, 32)
    scale = chunks.abs().amax(2, keepdim=True) / 127
    return (scale * (chunks / scale).round().nan_to_num()).view(x.shape)


@needs_library
@pytest.mark.parametrize("name", INTEGERS)
def test_integer_products_are_those_of_rounded_rows_on_every_processor(name: str, isa: str) -> None:
    planes = random_planes(get_format(name), (64, 512), seed=len(name))
    packed, exact = from_planes(name, planes, "bfloat16", TILES), defined(get_format(name), planes)
    x, compute = rows_of(150, 512), matmul(deterministic=False, integer=True)
    x[7, 32:64] = 0
    whole = compute.linear(x, packed)
    assert error_of(whole, rounded(x) @ exact.t()) < TOLERANCE, "the rounding of results alone"
    assert error_of(whole, x.double() @ exact.t()) < 0.01
    assert not torch.equal(whole, matmul().linear(x, packed)), "products of floats are others"
    for first, count in ((0, 1), (3, 2), (1, 7), (20, 13), (0, 25), (5, 129)):
        part = slice(first, first + count)
        assert torch.equal(compute.linear(x[part], packed), whole[part]), (isa, count)
    kernels = library.loaded().library
    assert kernels is not None
    library.choose(kernels, "avx2")
    assert torch.equal(compute.linear(x, packed), whole), "integer sums are exact, and the others have one order"


@needs_library
@pytest.mark.parametrize("name", INTEGERS)
def test_integer_sums_of_the_largest_codes_and_activations_fit(name: str, isa: str) -> None:
    """Processors without VNNI add products of a chunk in 16 bits."""
    planes = random_planes(get_format(name), (64, 512), seed=len(name))
    x = torch.tensor([[1.0], [-1.0], [1.0], [1.0], [-1.0]]).repeat(1, 512).bfloat16()
    for byte in (0x00, 0x77, 0x7F, 0x80, 0xFF):
        codes = torch.full(planes.codes.shape, byte, dtype=torch.uint8).view(planes.codes.dtype)
        extreme = planes._replace(codes=codes)
        packed, exact = from_planes(name, extreme, "bfloat16", TILES), defined(get_format(name), extreme)
        for count in (1, 2, 5):
            y, wanted = matmul(integer=True).linear(x[:count], packed), x[:count].double() @ exact.t()
            assert (y.double() - wanted).norm() <= TOLERANCE * wanted.norm(), (isa, byte, count)


@needs_library
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_rows_that_are_not_finite_give_nan_and_leave_their_neighbours_alone(wrong: float) -> None:
    packed, x = pack(rows_of(64, 128), "int4", TILES), rows_of(5, 128)
    compute = matmul(integer=True)
    right = compute.linear(x, packed)
    x[2, 70] = wrong
    found = compute.linear(x, packed)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], right[[0, 1, 3, 4]])


@needs_library
@given(
    st.data(),
    st.sampled_from(NAMES),
    st.integers(1, 5),
    st.integers(0, 140),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_products_of_any_size(
    data: st.DataObject, name: str, tiles: int, num_rows: int, biased: bool, integer: bool, seed: int
) -> None:
    shape = (64 * tiles, data.draw(widths(get_format(name).group or 32), label="columns"))
    planes = random_planes(get_format(name), shape, seed)
    packed, exact = from_planes(name, planes, "bfloat16", TILES), defined(get_format(name), planes)
    memory = rows_of(num_rows, shape[1] + 5, seed)
    x, bias = memory[:, 2:-3], rows_of(1, shape[0], seed)[0] if biased else None
    out = torch.full((num_rows, shape[0] + 2), 7.0, dtype=torch.bfloat16)
    compute = matmul(integer=integer)
    compute.linear(x, packed, bias, out=out[:, 1:-1])
    integer = integer and get_format(name).codes in INTEGER_CODES
    wanted = (rounded(x) if integer else x.double()) @ exact.t() + (0 if bias is None else bias.double())
    assert num_rows == 0 or error_of(out[:, 1:-1], wanted) < 2 * TOLERANCE
    assert (out[:, [0, -1]] == 7).all(), "nothing is written beside the result"
    for threads in (1, 3):
        assert torch.equal(matmul(threads, integer=integer).linear(x, packed, bias), out[:, 1:-1])


@needs_library
@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].whole_rows])
def test_where_a_row_has_one_scale_its_last_columns_count(name: str, integer: bool, isa: str) -> None:
    """Sums are scaled every 128 columns, which divides few widths of published models."""
    for columns in (32, 160, *(width for width in ODD_WIDTHS if width % 32 == 0 and width < 12288)):
        planes = random_planes(get_format(name), (64, columns), columns)
        packed, exact = from_planes(name, planes, "bfloat16", TILES), defined(get_format(name), planes)
        for num_rows in (1, 30):
            x = rows_of(num_rows, columns)
            wanted = (rounded(x) if integer else x.double()) @ exact.t()
            assert error_of(matmul(integer=integer).linear(x, packed), wanted) < TOLERANCE, (isa, columns, num_rows)


def experts_of(name: str, count: int, width: int, inner: int, biased: bool) -> list[ExpertWeights]:
    return [
        ExpertWeights(
            pack(rows_of(2 * inner, width, seed) / 8, name, TILES),
            pack(rows_of(width, inner, seed + 50) / 8, name, TILES),
            rows_of(1, 2 * inner, seed)[0] if biased else None,
            rows_of(1, width, seed)[0] if biased else None,
        )
        for seed in range(count)
    ]


def definition(hidden: Tensor, expert: ExpertWeights, gate: Gate) -> Tensor:
    def product(x: Tensor, matrix: PackedTensor, bias: Tensor | None) -> Tensor:
        y = x @ matrix.dequantize(torch.empty(matrix.shape)).double().t()
        return y if bias is None else y + bias.double()

    inner = product(hidden.double(), expert.up, expert.up_bias)
    pairs = (inner[:, ::2], inner[:, 1::2]) if gate.alternating else inner.chunk(2, 1)
    return product(ACTIVATIONS[gate.activation](*pairs), expert.down, expert.down_bias)


@pytest.mark.parametrize(("alternating", "integer"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_experts_agree_with_float64_one_by_one_and_together(
    activation: str, alternating: bool, integer: bool, isa: str
) -> None:
    gate, experts = Gate(activation, alternating), experts_of("int4", 3, 128, 64, biased=True)
    hidden, token_ids = 3 * rows_of(40, 128), torch.arange(200) % 40
    # Rows 141 to 159 belong to nobody.
    spans = [(0, 141), (160, 1), (161, 39)]
    wanted = [tiled.ExpertRows(*span, *each.operands) for span, each in zip(spans, experts, strict=True)]
    out = torch.zeros(200, 128, dtype=torch.bfloat16)
    assert matmul(integer=integer).experts(hidden, token_ids, wanted, gate, out)
    assert not out[141:160].any()
    for (first, count), expert in zip(spans, experts, strict=True):
        exact = definition(hidden[token_ids[first : first + count]], expert, gate)
        assert error_of(out[first : first + count], exact) < (4 if integer else 2) * TOLERANCE, isa
    again = torch.zeros_like(out)
    for one in wanted:
        compute = Matmul(Workspace(40 * row_nbytes(192)), True, integer)
        assert compute.experts(hidden, token_ids, [one], gate, again)
    assert torch.equal(again, out), "neither neighbours, threads nor scratch show"


@needs_library
@given(st.integers(1, 60), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_mixing_does_not_depend_on_threads_nor_on_other_tokens(tokens: int, per_token: int, seed: int) -> None:
    """Some experts get one row, some many, some none."""
    experts = experts_of("nf4", 9, 64, 64, biased=False)
    hidden = rows_of(tokens, 64, seed)
    weights, ids = torch.randn(tokens, 9, generator=torch.Generator().manual_seed(seed)).softmax(1).topk(per_token)
    body = ExpertBody(lambda x: ACTIVATIONS["silu"](*x.chunk(2, 1)), gate=Gate("silu"))

    def mixed(compute: ParallelMatmul, count: int) -> Tensor:
        source = HeldExperts(0, experts, RoutingStats({0: 9}))
        return mix_experts(hidden[:count], ids[:count], weights[:count].bfloat16(), source, body, compute)

    together = mixed(matmul(3), tokens)
    assert torch.equal(mixed(matmul(1), tokens), together)
    assert torch.equal(mixed(matmul(2), 1), together[:1])
    assert group_by_expert(ids, 9).num_rows >= tokens * per_token


@needs_library
def test_many_rows_are_multiplied_by_dequantized_matrices_where_that_was_measured_to_be_faster() -> None:
    packed, expert = pack(rows_of(128, 64), "int4", TILES), experts_of("int4", 1, 64, 32, biased=False)[0]
    few = matmul(deterministic=False, gemv_max_rows={TILES: 4})
    every = matmul(deterministic=False, gemv_max_rows={TILES: ALL_ROWS})
    x, out = rows_of(5, 64), torch.empty(5, 64, dtype=torch.bfloat16)
    assert torch.equal(few.linear(x[:4], packed), every.linear(x[:4], packed))
    assert error_of(few.linear(x, packed), every.linear(x, packed).double()) < TOLERANCE
    for count in (4, 5):
        job = tiled.ExpertRows(0, count, *expert.operands)
        assert few.experts(x, torch.arange(5), [job], Gate("silu"), out) == (count == 4)
    assert not every.experts(x, torch.arange(5), [job], None, out), "what it does not know it leaves to torch"


def test_without_the_library_the_same_codes_are_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = pack(rows_of(128, 64), "int4", TILES), rows_of(40, 64)
    exact = x.double() @ packed.dequantize(torch.empty(packed.shape)).double().t()
    monkeypatch.setattr(tiled, "available", lambda: False)
    assert kernel_order("int4", torch.bfloat16, "cpu") != TILES
    for deterministic in (False, True):
        assert error_of(matmul(deterministic=deterministic).linear(x, packed), exact) < 2 * TOLERANCE


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("sanitizers", SANITIZERS)
def test_products_run_clean_under_sanitizers(sanitizers: str, tmp_path: Path) -> None:
    """A sample; `make matrix ARGS=native` runs many shapes."""
    assert run_driver(build_driver(tmp_path, DRIVERS["products"], SANITIZERS[sanitizers]), cases=8) == ""
