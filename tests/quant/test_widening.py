"""Widening by the library of CPU kernels: the bits of the codec, whatever the processor has; and torch's way."""

import os
import subprocess
import sys
from collections.abc import Iterator
from ctypes import c_int

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moedge.quant.formats import mxfp4
from moedge.quant.matmul.matmul import Matmul, Workspace
from moedge.quant.native import calls, library
from moedge.quant.native.build import SETS
from moedge.quant.scratch import scratch_nbytes
from moedge.quant.tensor import pack

pytestmark = pytest.mark.numerics
NO_LIBRARY = library.portable("moedge_widen") is None
needs_library = pytest.mark.skipif(NO_LIBRARY, reason=f"no library of CPU kernels: {library.lack()}")
Planes = tuple[Tensor, Tensor]


def choose(number: int) -> int:
    """Lets the library use the instruction sets up to this one, 0 for none of them; returns which it uses."""
    found, lack = library._opened()
    assert found is not None, lack
    return int(found.moedge_choose(c_int(number)))


@pytest.fixture(params=["none", *SETS])
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor has, and the code for processors without AVX2."""
    if NO_LIBRARY:
        pytest.skip(library.lack())
    wanted = ["none", *SETS].index(request.param)
    if choose(wanted) != wanted:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    choose(["", *SETS].index(library.loaded().isa))


def by_torch(planes: Planes) -> Tensor:
    out = torch.empty(len(planes[0]), 2 * planes[0].shape[1], dtype=torch.bfloat16)
    mxfp4._unpack_exactly(*planes, out)
    return out


def by_library(planes: Planes) -> Tensor:
    out = torch.full((len(planes[0]), 2 * planes[0].shape[1]), 7, dtype=torch.bfloat16)
    assert calls.widen_mxfp4(*planes, out)
    return out


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Torch's own kernels differ in the bits of NaN."""
    nan = one.isnan()
    bits = (torch.where(nan, 0, each).view(torch.int16) for each in (one, other))
    return torch.equal(nan, other.isnan()) and torch.equal(*bits)


def every_code_and_scale() -> Planes:
    """Row s has scale s, and every byte in each place of a group."""
    turned = torch.cat([torch.arange(256).roll(shift) for shift in range(16)]).to(torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, len(turned) // 16)
    return turned.expand(256, -1).contiguous(), scales.contiguous()


def test_every_byte_with_every_scale_has_the_bits_of_the_codec(each_isa: str) -> None:
    planes = every_code_and_scale()
    found = by_library(planes)
    assert same_bits(found, by_torch(planes)), each_isa
    # And those of the definition, rounded once: only overflow does.
    levels = torch.tensor(mxfp4.LEVELS, dtype=torch.float64)
    numbers = torch.stack([levels[(planes[0] & 15).int()], levels[(planes[0] >> 4).int()]], 2).flatten(1)
    powers = torch.exp2(torch.arange(256, dtype=torch.float64) - 127)
    assert same_bits(found[:255], (numbers * powers[:, None])[:255].bfloat16())
    assert found[255].isnan().all()
    zeros = found[:255][numbers[:255] == 0]
    assert (zeros == 0).all()
    assert 0 < int(zeros.signbit().sum()) < len(zeros)


@st.composite
def any_planes(draw: st.DrawFn) -> Planes:
    """Slices of larger planes: of rows, of columns, of both."""
    rows, groups, above, left, right = (
        draw(st.integers(least, most)) for least, most in ((1, 40), (1, 9), *[(0, 3)] * 3)
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    codes = torch.randint(0, 256, (above + rows, (left + groups + right) * 16), generator=generator, dtype=torch.uint8)
    least, most = draw(st.sampled_from([(0, 256), (0, 4), (110, 130), (250, 256)]))
    shape = (above + rows, left + groups + right)
    scales = torch.randint(least, most, shape, generator=generator, dtype=torch.int32).to(torch.uint8)
    return codes[above:, left * 16 : (left + groups) * 16], scales[above:, left : left + groups]


@needs_library
@given(any_planes(), st.integers(0, 31))
@settings(max_examples=60, deadline=None)
def test_slices_anywhere_have_the_bits_of_the_codec_and_nothing_else_is_written(planes: Planes, beside: int) -> None:
    rows, columns = len(planes[0]), 2 * planes[0].shape[1]
    wanted = by_torch(planes)
    try:
        for number in range(len(SETS) + 1):
            choose(number)
            memory = torch.full((beside + rows * columns + 32,), 7, dtype=torch.bfloat16)
            out = memory[beside : beside + rows * columns].view(rows, columns)
            mxfp4.unpack(planes, out, out)
            assert same_bits(out, wanted)
            assert (memory[:beside] == 7).all()
            assert (memory[beside + rows * columns :] == 7).all()
    finally:
        choose(["", *SETS].index(library.loaded().isa))


def test_a_bit_of_a_code_or_a_scale_shows(each_isa: str) -> None:
    codes, scales = torch.full((4, 64), 0x21, dtype=torch.uint8), torch.full((4, 4), 127, dtype=torch.uint8)
    right = by_torch((codes, scales))
    codes[2, 17] ^= 0x10
    changed = (by_library((codes, scales)) != right).nonzero().tolist()
    assert changed == [[2, 35]]
    codes[2, 17] ^= 0x10
    scales[1, 3] ^= 1
    changed = (by_library((codes, scales)) != right).nonzero().tolist()
    assert changed == [[1, column] for column in range(96, 128)]


def test_what_the_library_does_not_take_is_left_to_torch() -> None:
    planes = codes, scales = pack(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), "mxfp4").planes
    wanted = by_torch((codes, scales))
    apart = codes.t().contiguous().t(), scales.t().contiguous().t()
    for given_planes, dtype in ((apart, torch.bfloat16), (planes, torch.float32), (planes, torch.float16)):
        out = torch.empty(64, 64, dtype=dtype)
        assert not calls.widen_mxfp4(*given_planes, out)
        mxfp4.unpack(given_planes, out, out)
        assert torch.equal(out, wanted.to(dtype))
    assert not calls.widen_mxfp4(codes, scales, torch.empty(64, 64, dtype=torch.bfloat16).t())


def test_without_the_function_without_a_library_and_after_wrong_numbers_torch_widens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = pack(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16(), "mxfp4")
    wanted = by_torch((packed.planes[0], packed.planes[1]))
    with monkeypatch.context() as patch:
        patch.setattr(library, "loaded", lambda: library.LoadedLibrary(object()))  # type: ignore[arg-type]
        assert library.portable("moedge_widen") is None
        patch.setattr(library, "loaded", lambda: library.LoadedLibrary(lack="none"))
        patch.setattr(library, "_opened", lambda: (None, "it was not built"))
        assert library.portable("moedge_widen") is None
    with monkeypatch.context() as patch:
        patch.setattr(calls, "_mxfp4_widener", lambda: None)
        assert not calls.widen_mxfp4(*packed.planes, torch.empty_like(wanted))
        assert torch.equal(packed.dequantize(), wanted)
    monkeypatch.setattr(library, "_refusals", ["wrong"])
    assert not calls.widen_mxfp4(*packed.planes, torch.empty_like(wanted))
    assert torch.equal(packed.dequantize(), wanted)


@needs_library
def test_products_that_widen_first_use_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16(), "mxfp4")
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    products = Matmul(Workspace(scratch_nbytes(packed.layout, "bfloat16", False)))
    with_library = products.linear(x, packed)
    monkeypatch.setattr(mxfp4, "_unpack_exactly", None)
    assert torch.equal(products.linear(x, packed), with_library)
    monkeypatch.undo()
    monkeypatch.setattr(calls, "_mxfp4_widener", lambda: None)
    assert torch.equal(products.linear(x, packed), with_library)


@needs_library
def test_moedge_isa_none_leaves_the_code_for_every_processor() -> None:
    code = (
        "import torch; from moedge.quant.native import calls, library;"
        "out = torch.empty(1, 32, dtype=torch.bfloat16); byte = lambda n, x: torch.full((1, n), x, dtype=torch.uint8);"
        "assert calls.widen_mxfp4(byte(16, 0xf1), byte(1, 128), out);"
        "print(library.lack(), library.available(), out[0, :2].tolist())"
    )
    environment = os.environ | {"MOEDGE_ISA": "none"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "MOEDGE_ISA=none False [1.0, -12.0]\n"
