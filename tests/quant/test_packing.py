"""Quantizing by the library of CPU kernels: the bytes of the codecs for all weights, orders and threads."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moedge.quant import tensor
from moedge.quant.formats import mxfp4, nf4
from moedge.quant.formats.format import NF4PACK, ROWS, TILES, FormatError, get_format
from moedge.quant.matmul.matmul import ParallelMatmul, Workspace
from moedge.quant.native import build, library
from moedge.quant.tensor import CODECS, ForEach, PackedTensor, in_turn, pack_into
from support.native_driver import DRIVERS, SANITIZERS, build_driver, run_driver

pytestmark = pytest.mark.numerics
needs_library = pytest.mark.skipif(not library.available(), reason=f"no library of CPU kernels: {library.lack()}")

# Formats, orders and the rows and columns of whole blocks.
PACKED = [
    ("nf4", ROWS, 1, 64), ("nf4", TILES, 32, 64), ("int4", ROWS, 1, 32), ("int4", TILES, 32, 32),
    ("mxfp4", ROWS, 1, 32), ("mxfp4", TILES, 32, 32), ("int8", ROWS, 1, 1), ("int3", TILES, 32, 32),
    ("int3", ROWS, 32, 32), ("vq2", TILES, 32, 64), ("vq2", ROWS, 32, 64),
]  # fmt: skip
IDS = [f"{name} {order}" for name, order, *_ in PACKED]


def packed_bytes(weight: Tensor, name: str, order: str, for_each: ForEach = in_turn) -> Tensor:
    layout = get_format(name).in_order(order).layout((weight.shape[0], weight.shape[1]), "bfloat16")
    assert layout.order == order
    assert tensor.library_packs(weight, layout)
    buffer = torch.full((layout.nbytes,), 0xAB, dtype=torch.uint8)
    pack_into(weight, layout, buffer, for_each)
    return buffer


def codec_bytes(weight: Tensor, name: str, order: str) -> Tensor:
    layout = get_format(name).in_order(order).layout((weight.shape[0], weight.shape[1]), "bfloat16")
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    CODECS[layout.codes, order].pack(weight, PackedTensor.bind(layout, buffer).planes)
    return buffer


def finite(bits: Tensor) -> Tensor:
    weight = bits.to(torch.uint16).view(torch.bfloat16)
    return torch.where(weight.isfinite(), weight, 0)


def weights_of(kind: str, shape: tuple[int, int], seed: int) -> Tensor:
    """Weights that are usual, of any bits, subnormal, on midpoints of integers, or zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        return torch.randn(shape, generator=generator).bfloat16()
    if kind == "halves":
        return torch.randint(-256, 257, shape, generator=generator).mul(2.0 ** (seed % 40 - 20)).bfloat16()
    most = {"any": 1 << 15, "subnormal": 1 << 8, "zeros": 1}[kind]
    signs = torch.randint(0, 2, shape, generator=generator) << 15
    return finite(torch.randint(0, most, shape, generator=generator) | signs)


@needs_library
@given(
    st.sampled_from(PACKED), st.sampled_from(["gaussian", "any", "subnormal", "halves", "zeros"]), st.integers(1, 5),
    st.integers(1, 11), st.integers(0, 4), st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_bytes_are_those_of_the_codec(
    packed: tuple[str, str, int, int], kind: str, blocks: int, groups: int, beside: int, seed: int
) -> None:
    name, order, rows, group = packed
    # Where a block may be incomplete: below, at and above whole ones.
    shape = blocks * (rows if rows > 1 else 1 + seed % 40), group * groups if group > 1 else 1 + seed % 150
    memory = weights_of(kind, (shape[0], shape[1] + beside), seed)
    weight = memory[:, beside:]
    wanted = codec_bytes(weight, name, order)
    found = library.loaded()
    assert found.library is not None
    try:
        for each in build.SETS:
            library.choose(found.library, each)
            assert torch.equal(packed_bytes(weight, name, order), wanted), each
    finally:
        library.choose(found.library, found.isa)


@pytest.mark.parametrize(("name", "order"), [("int3", ROWS), ("int3", TILES), ("vq2", ROWS), ("vq2", TILES)])
def test_bytes_are_those_of_the_codec_where_columns_count_otherwise(name: str, order: str, isa: str) -> None:
    weight, importance = (
        weights_of("gaussian", (64, 192), 5),
        torch.rand(192, generator=torch.Generator().manual_seed(6)) + 0.1,
    )
    layout = get_format(name).in_order(order).layout((64, 192), "bfloat16")
    found, wanted = (torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(2))
    assert tensor.library_packs(weight, layout)
    pack_into(weight, layout, found, importance=importance)
    CODECS[name, order].pack(weight, PackedTensor.bind(layout, wanted).planes, importance)  # type: ignore[call-arg]
    assert torch.equal(found, wanted), isa
    assert not torch.equal(found, packed_bytes(weight, name, order))


def midpoint_rows(name: str, group: int) -> Tensor:
    """Groups of every largest number of 8 bits in four scales, with numbers at and beside midpoints between levels."""
    magnitudes = [6 * each for each in nf4.LEVELS] if name == "nf4" else list(mxfp4.LEVELS)
    levels = sorted({abs(each) / 6 for each in magnitudes} | {each / 15 for each in range(-15, 16)})
    middles = torch.tensor([(low + high) / 2 for low, high in pairwise(levels)])
    rows = []
    for base in (0x3F80, 0x0080, 0x0000, 0x7F00):
        top = torch.arange(base, base + 128).to(torch.uint16).view(torch.bfloat16)
        points = (top.float()[:, None] * middles).bfloat16().view(torch.uint16).to(torch.int32)
        beside = torch.cat([points, (points + 1) & 0xFFFF, points - points.bool().int()], 1)
        numbers = torch.cat([finite(beside), -finite(beside)], 1)
        numbers = torch.where(numbers.abs() <= top[:, None], numbers, 0)
        numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % (group - 1))).view(128, -1, group - 1)
        rows.append(torch.cat([numbers, top[:, None, None].expand(-1, numbers.shape[1], 1)], 2).flatten(1))
    return torch.cat(rows)


@pytest.mark.parametrize(("name", "order", "rows", "group"), PACKED, ids=IDS)
def test_ties_and_their_neighbours_get_the_codes_of_the_codec(
    name: str, order: str, rows: int, group: int, isa: str
) -> None:
    weight = midpoint_rows(name, max(32, group))
    assert torch.equal(packed_bytes(weight, name, order), codec_bytes(weight, name, order)), isa


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("name", "order", "rows", "group"), PACKED, ids=IDS)
def test_weights_that_are_not_finite_are_refused_wherever_they_are(
    name: str, order: str, rows: int, group: int, bad: float, isa: str
) -> None:
    for row, column in ((0, 0), (63, 255), (31, 64), (17, 127)):
        weight = weights_of("gaussian", (64, 256), 1)
        weight[row, column] = bad
        with pytest.raises(FormatError, match=r"1 NaN or infinite weights were found in a matrix \[64, 256\]"):
            packed_bytes(weight, name, order)


@needs_library
@pytest.mark.parametrize(("name", "order", "rows", "group"), PACKED, ids=IDS)
def test_neither_threads_nor_chunks_nor_strides_show(
    name: str, order: str, rows: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = weights_of("gaussian", (256, 192), 2)
    whole = packed_bytes(weight, name, order)
    monkeypatch.setattr(tensor, "LIBRARY_CHUNK", 100 * 192)
    threads = ParallelMatmul(Workspace(0), helpers=[Workspace(0) for _ in range(2)])
    assert torch.equal(packed_bytes(weight.t().contiguous().t(), name, order, threads.for_each), whole)


@needs_library
def test_only_bfloat16_weights_in_orders_with_a_kernel_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(64, 64)
    takes = {
        (name, order, dtype): tensor.library_packs(weight, get_format(name).in_order(order).layout((64, 64), dtype))
        for name, order, dtype in (
            ("nf4", TILES, "bfloat16"), ("nf4", TILES, "float32"), ("nf4", NF4PACK, "bfloat16"),
            ("int8", TILES, "bfloat16"), ("none", ROWS, "bfloat16"), ("nf4-f32", ROWS, "bfloat16"),
        )
    }  # fmt: skip
    assert [key for key, taken in takes.items() if taken] == [("nf4", TILES, "bfloat16")]
    monkeypatch.setattr(tensor, "available", lambda: False)
    assert not tensor.library_packs(weight, get_format("nf4").layout((64, 64), "bfloat16"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(build.COMPILER) is None, reason=f"{build.COMPILER} was not found")
@pytest.mark.parametrize("sanitizers", SANITIZERS)
def test_packing_runs_clean_under_sanitizers(sanitizers: str, tmp_path: Path) -> None:
    """A sample; `make matrix ARGS=native` runs many shapes."""
    assert run_driver(build_driver(tmp_path, DRIVERS["packing"], SANITIZERS[sanitizers]), cases=40) == ""
