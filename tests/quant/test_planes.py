"""Every format holds the planes of a checkpoint without rounding, multiplies by them and changes their order
(`quant/tensor.py`).
"""

import pytest
import torch

from moedge.quant.formats import int4
from moedge.quant.formats.format import FORMATS, INT4PACK, NF4PACK, ROWS, TILES, FormatError, get_format
from moedge.quant.matmul import tiled
from moedge.quant.matmul.matmul import Matmul, Workspace, measure_gemv_max_rows
from moedge.quant.scratch import scratch_nbytes
from moedge.quant.tensor import Planes, dtype_name, pack, pack_nibbles, unpack_nibbles
from support.kernels.relayout import from_planes, planes_of, relayout
from support.random_planes import defined, random_planes

pytestmark = pytest.mark.numerics

NAMES = sorted(set(FORMATS) - {"none"})
ORDERED = [(name, order) for name in NAMES for order in sorted({ROWS, *FORMATS[name].orders})]
# Whole blocks of 32 rows, but not of 64.
SHAPE = (96, 512)


@pytest.mark.parametrize(("name", "order"), ORDERED)
def test_a_matrix_is_what_its_planes_stand_for(name: str, order: str) -> None:
    planes = random_planes(get_format(name), SHAPE)
    packed = from_planes(name, planes, "bfloat16", order)
    wanted = defined(get_format(name), planes)
    # Zeros may cancel a weight that is a hundred times as large.
    torch.testing.assert_close(packed.dequantize(torch.empty(SHAPE)).double(), wanted, rtol=1e-5, atol=1e-6)
    assert torch.equal(packed.dequantize(), packed.dequantize(torch.empty(SHAPE)).bfloat16())


@pytest.mark.parametrize(("name", "order"), ORDERED)
def test_planes_come_back_bit_by_bit_in_every_order(name: str, order: str) -> None:
    planes = random_planes(get_format(name), SHAPE)
    packed = from_planes(name, planes, "bfloat16", order)
    for given, back in zip(planes, planes_of(packed), strict=True):
        assert (given is None) == (back is None)
        assert given is None or torch.equal(given, back)
    again = relayout(relayout(packed, ROWS), order)
    assert all(torch.equal(one, other) for one, other in zip(again.planes, packed.planes, strict=True))


# A bfloat16 product rounds its result, the widened weights, and scales and zeros of 16 other bits.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 7e-3}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("name", "order"), ORDERED)
def test_products_agree_with_float64(name: str, order: str, dtype: torch.dtype) -> None:
    planes = random_planes(get_format(name), SHAPE)
    packed = from_planes(name, planes, "bfloat16", order)
    exact_weight = defined(get_format(name), planes)
    for deterministic in (False, True):
        workspace = Workspace(scratch_nbytes(packed.layout, dtype_name(dtype), deterministic))
        compute = Matmul(workspace, deterministic)
        for num_rows in (3, 40):
            x = torch.randn(num_rows, SHAPE[1], generator=torch.Generator().manual_seed(num_rows)).to(dtype)
            exact = x.double() @ exact_weight.t()
            error = (compute.linear(x, packed).double() - exact).norm() / exact.norm()
            assert error < TOLERANCES[dtype], (deterministic, num_rows)


@pytest.mark.skipif(not int4.has_kernel(), reason="torch's kernel orders codes otherwise on this processor")
@pytest.mark.parametrize("name", [name for name in NAMES if INT4PACK in FORMATS[name].orders])
def test_torch_s_kernel_multiplies_by_4_bit_integers_of_every_kind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    kernel = torch._weight_int4pack_mm_for_cpu
    monkeypatch.setattr(
        torch,
        "_weight_int4pack_mm_for_cpu",
        lambda x, codes, group, pairs: (taken.append(group), kernel(x, codes, group, pairs))[1],
    )
    packed = from_planes(name, random_planes(get_format(name), SHAPE), "bfloat16")
    x = torch.randn(2, SHAPE[1]).bfloat16()
    Matmul(Workspace(0)).linear(x, packed)
    assert taken == [get_format(name).group]
    in_rows = relayout(packed, ROWS)
    Matmul(Workspace(scratch_nbytes(in_rows.layout, "bfloat16", False))).linear(x, in_rows)
    assert len(taken) == 1


def test_an_order_by_blocks_of_rows_falls_back_where_blocks_are_not_whole() -> None:
    weight = torch.randn(70, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    blocks, in_rows = pack(weight, "nf4", NF4PACK), pack(weight, "nf4")
    assert blocks.layout == in_rows.layout
    assert pack(weight[:64], "nf4", NF4PACK).nbytes == pack(weight[:64], "nf4").nbytes


@pytest.mark.parametrize("name", ["int4-g128-f16-zp", "int8-g32-f16"])
def test_formats_of_checkpoints_have_the_rates_of_those_of_the_option(name: str) -> None:
    measured = measure_gemv_max_rows(name)
    by_torch = {"int4"} if name.startswith("int4") and int4.has_kernel() else set()
    assert set(measured) == by_torch | ({TILES} if tiled.has_kernel() else set())


@pytest.mark.parametrize("name", ["int8", "int4", "nf4"])
def test_planes_of_a_packed_matrix_make_the_same_bytes(name: str) -> None:
    packed = pack(torch.randn(70, 128, generator=torch.Generator().manual_seed(1)).bfloat16(), name)
    again = from_planes(name, planes_of(packed), "bfloat16")
    assert all(torch.equal(one, other) for one, other in zip(again.planes, packed.planes, strict=True))


@pytest.mark.parametrize("high_first", [False, True])
def test_nibbles_are_packed_in_the_order_that_is_named(high_first: bool) -> None:
    numbers = torch.randint(0, 16, (3, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    codes = pack_nibbles(numbers, high_first)
    assert torch.equal(unpack_nibbles(codes, high_first), numbers)
    low, high = codes[0, 0] & 15, codes[0, 0] >> 4
    assert ([high, low] if high_first else [low, high]) == list(numbers[0, :2])


def broken(**changes: object) -> Planes:
    return random_planes(get_format("int4-g128-f16-zp"), (8, 256))._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("planes", "words"),
    [
        (broken(zeros=None), "Planes .* wants .*zeros"),
        (broken(scales=torch.zeros(8, 2)), "float32.* wants .*float16"),
        (broken(scales=torch.zeros(8, 4).half()), r"wants .*'scales', \[8, 2\]"),
        (broken(scales=torch.full((8, 2), torch.inf).half()), "NaN or infinite scales"),
    ],
)
def test_planes_that_do_not_fit_are_refused(planes: Planes, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        from_planes("int4-g128-f16-zp", planes, "bfloat16")


def test_orders_and_formats_that_do_not_go_together_are_refused() -> None:
    packed = from_planes("nf4-f32", random_planes(get_format("nf4-f32"), (8, 128)), "bfloat16")
    with pytest.raises(FormatError, match=f"{INT4PACK!r} was found; codes of nf4-f32 lie in order 'rows'"):
        relayout(packed, INT4PACK)
    with pytest.raises(FormatError, match="only quantized ones"):
        planes_of(pack(torch.zeros(2, 2), "none"))
    with pytest.raises(FormatError, match="use int4"):
        pack(torch.zeros(2, 128), "int4-g128-f16")
