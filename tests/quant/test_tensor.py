import pytest
import torch
from torch import Tensor

from moedge.quant.formats.format import ALIGNMENT, QUANT_FORMATS, FormatError, get_format
from moedge.quant.tensor import PackedTensor, pack, pack_into
from support.packing_error import relative_error

NAMES = sorted(QUANT_FORMATS)


def gaussian(num_rows: int, num_columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(11)).to(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_binding_copies_nothing(name: str) -> None:
    layout = get_format(name).layout((5, 128), "bfloat16")
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    packed = PackedTensor.bind(layout, buffer)
    for tensor, plane in zip(packed.planes, layout.planes, strict=True):
        assert tensor.data_ptr() == buffer.data_ptr() + plane.offset
        assert tuple(tensor.shape) == plane.shape
        assert tensor.is_contiguous()
        assert tensor.nbytes == plane.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_new_bytes_in_the_buffer_are_a_new_matrix(name: str) -> None:
    layout = get_format(name).layout((5, 128), "bfloat16")
    slot, arriving = torch.zeros(2, layout.nbytes, dtype=torch.uint8)
    bound = PackedTensor.bind(layout, slot)
    for weight in (gaussian(5, 128), gaussian(5, 128).neg()):
        packed = pack_into(weight, layout, arriving)
        slot.copy_(arriving)
        assert torch.equal(bound.dequantize(), packed.dequantize())


@pytest.mark.parametrize("name", NAMES)
def test_matrices_side_by_side_in_one_shard_do_not_touch_each_other(name: str) -> None:
    weights = [gaussian(3, 64), gaussian(7, 192), gaussian(1, 128)]
    layouts = [get_format(name).layout((len(w), w.shape[1]), "bfloat16") for w in weights]
    shard = torch.full((sum(layout.nbytes for layout in layouts),), 0xAB, dtype=torch.uint8)
    slots = shard.split([layout.nbytes for layout in layouts])
    packed = [pack_into(*three) for three in zip(weights, layouts, slots, strict=True)]
    for weight, tensor in zip(weights, packed, strict=True):
        assert torch.equal(tensor.dequantize(), pack(weight, name).dequantize())


@pytest.mark.parametrize("name", NAMES)
def test_packing_decides_every_byte_of_the_buffer(name: str) -> None:
    layout = get_format(name).layout((3, 64), "bfloat16")
    buffers = [torch.full((layout.nbytes,), fill, dtype=torch.uint8) for fill in (0, 255)]
    for buffer in buffers:
        pack_into(gaussian(3, 64), layout, buffer)
    assert torch.equal(*buffers)


@pytest.mark.parametrize("name", NAMES)
def test_dequantizing_into_a_given_tensor_fills_and_returns_it(name: str) -> None:
    packed = pack(gaussian(6, 64), name)
    out = torch.full((6, 64), torch.nan)
    assert packed.dequantize(out) is out
    assert torch.equal(out.bfloat16(), packed.dequantize())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "out",
    [torch.empty(64, 6).t(), torch.empty(5, 64), torch.empty(6, 64, dtype=torch.float64)],
    ids=["strided", "short", "float64"],
)
def test_outputs_that_kernels_would_overrun_are_refused(name: str, out: Tensor) -> None:
    with pytest.raises(FormatError, match="contiguous"):
        pack(gaussian(6, 64), name).dequantize(out)


def test_buffers_that_do_not_fit_are_refused() -> None:
    layout = get_format("int8").layout((4, 64), "float32")
    wrong = [
        torch.zeros(layout.nbytes - ALIGNMENT, dtype=torch.uint8),
        torch.zeros(layout.nbytes, dtype=torch.int8),
        torch.zeros(layout.nbytes + ALIGNMENT, dtype=torch.uint8)[16 : 16 + layout.nbytes],
    ]
    for buffer in wrong:
        with pytest.raises(FormatError, match=f"wants uint8 .{layout.nbytes}. at a multiple of {ALIGNMENT}"):
            PackedTensor.bind(layout, buffer)


@pytest.mark.parametrize("weight", [torch.zeros(4, 128), torch.zeros(4, 64).bfloat16()], ids=["shape", "dtype"])
def test_weights_that_are_not_the_layout_are_refused(weight: Tensor) -> None:
    layout = get_format("int8").layout((4, 64), "float32")
    with pytest.raises(FormatError, match=r"this layout wants \[4, 64\] of float32"):
        pack_into(weight, layout, torch.zeros(layout.nbytes, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_none_keeps_every_bit(dtype: torch.dtype) -> None:
    weight = gaussian(9, 37, dtype)
    packed = pack(weight, "none")
    assert packed.dtype == dtype
    assert torch.equal(packed.dequantize().view(torch.uint8), weight.view(torch.uint8))


def test_formats_stand_in_order_of_their_error_on_gaussian_weights() -> None:
    weight = gaussian(256, 1024, torch.float32)
    errors = {name: relative_error(weight, pack(weight, name)) for name in NAMES}
    assert errors["none"] == 0
    assert 0.005 < errors["int8"] < 0.012
    assert 0.085 < errors["nf4"] < 0.1


def test_the_error_of_zeros_is_zero() -> None:
    assert relative_error(torch.zeros(2, 64), pack(torch.zeros(2, 64), "nf4")) == 0


def test_wrapping_copies_nothing_and_equals_packing_as_none() -> None:
    weight = gaussian(6, 64)
    wrapped = PackedTensor.wrap(weight)
    assert wrapped.planes[0].data_ptr() == weight.data_ptr()
    assert wrapped.layout == pack(weight, "none").layout
    assert torch.equal(wrapped.dequantize(), weight)
