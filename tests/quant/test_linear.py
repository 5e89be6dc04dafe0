"""Products with packed matrices (`quant/matmul/matmul.py`, `quant/matmul/tiled.py`) agree with float64 over the same
codes; rounded activations and deterministic rows keep what is promised of them.
"""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from moedge.quant import scratch
from moedge.quant.formats import bitsandbytes_kernels, int8
from moedge.quant.formats.format import ALIGNMENT, NF4PACK, QUANT_FORMATS, TILES, FormatError
from moedge.quant.matmul import matmul, tiled
from moedge.quant.matmul.matmul import FEW_NUMBERS, GEMV_MAX_ROWS, Matmul, ParallelMatmul, Workspace, kernel_order
from moedge.quant.matmul.thread_pool import torch_threads
from moedge.quant.scratch import TILE, scratch_nbytes
from moedge.quant.tensor import PackedTensor, dtype_name, pack
from support.kernels.relayout import relayout

pytestmark = pytest.mark.numerics

# The formats, and the orders of codes that have kernels of their own.
NAMES = [*sorted(QUANT_FORMATS), NF4PACK, TILES]
# Relative L2 error of a product against float64 over the same packed matrix: a few roundings of the dtype.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}
DTYPES = list(TOLERANCES)


def gaussian(num_rows: int, num_columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed_as(weight: Tensor, name: str) -> PackedTensor:
    """`weight` in a format, or in an order of nf4 or int4 that takes whole blocks of rows."""
    if name == TILES:
        return pack(weight[: len(weight) // 64 * 64 or None], "int4", TILES)
    if name == NF4PACK:
        return pack(weight[: len(weight) // 32 * 32 or None], "nf4", NF4PACK)
    return pack(weight, name)


def compute_for(packed: PackedTensor, dtype: torch.dtype, deterministic: bool) -> ParallelMatmul:
    nbytes = scratch_nbytes(packed.layout, dtype_name(dtype), deterministic)
    return ParallelMatmul(Workspace(nbytes), deterministic)


def error_of(y: Tensor, x: Tensor, packed: PackedTensor) -> float:
    exact = x.double() @ packed.dequantize(torch.empty(packed.shape)).double().t()
    return float((y.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_products_agree_with_float64_over_the_same_packed_matrix(
    name: str, dtype: torch.dtype, deterministic: bool
) -> None:
    packed = packed_as(gaussian(100, 192, dtype), name)
    compute = compute_for(packed, dtype, deterministic)
    few = min(TILE, GEMV_MAX_ROWS.get(name, 8))
    for num_rows in (1, few, few + 1, TILE, TILE + 1, 3 * TILE):
        x = gaussian(num_rows, 192, dtype, seed=num_rows)
        y = compute.linear(x, packed)
        assert (y.dtype, y.shape) == (dtype, (num_rows, packed.shape[0]))
        assert error_of(y, x, packed) < TOLERANCES[dtype]


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("name", NAMES)
def test_strips_cover_the_matrix_once(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "STRIP_WEIGHTS", 7 * 64)
    monkeypatch.setattr(scratch, "DETERMINISTIC_STRIP_WEIGHTS", 5 * 64)
    packed = packed_as(gaussian(131, 64, torch.float32), name)
    x = gaussian(40, 64, torch.float32, seed=1)
    y = compute_for(packed, torch.float32, deterministic).linear(x, packed)
    assert error_of(y, x, packed) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("name", NAMES)
def test_activations_may_have_another_dtype_than_the_matrix(name: str, deterministic: bool) -> None:
    packed = packed_as(gaussian(20, 64, torch.bfloat16), name)
    x = gaussian(5, 64, torch.float32, seed=1)
    y = compute_for(packed, torch.float32, deterministic).linear(x, packed)
    assert error_of(y, x, packed) < TOLERANCES[torch.float32]


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("num_rows", [0, 2, 40])
@pytest.mark.parametrize("name", NAMES)
def test_the_bias_is_added(name: str, num_rows: int, deterministic: bool) -> None:
    packed = packed_as(gaussian(20, 64, torch.float32), name)
    compute = compute_for(packed, torch.float32, deterministic)
    x, bias = gaussian(num_rows, 64, torch.float32), gaussian(1, packed.shape[0], torch.float32)[0]
    torch.testing.assert_close(compute.linear(x, packed, bias), compute.linear(x, packed) + bias)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("name", NAMES)
def test_products_may_be_written_where_they_belong(name: str, deterministic: bool) -> None:
    packed = packed_as(gaussian(100, 64, torch.bfloat16), name)
    compute = compute_for(packed, torch.bfloat16, deterministic)
    for num_rows in (2, 40):
        x = gaussian(num_rows, 64, torch.bfloat16)
        room = torch.full((num_rows + 2, packed.shape[0]), torch.nan, dtype=torch.bfloat16)
        assert compute.linear(x, packed, out=room[1:-1]).data_ptr() == room[1].data_ptr()
        assert torch.equal(room[1:-1], compute.linear(x, packed))
        assert room[0].isnan().all()
        assert room[-1].isnan().all()


def integer_compute() -> ParallelMatmul:
    return ParallelMatmul(Workspace(0), integer=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_integer_products_are_those_of_rounded_activations(dtype: torch.dtype) -> None:
    packed = pack(gaussian(100, 192, dtype), "int8")
    x = gaussian(33, 192, dtype, seed=1) * torch.logspace(-3, 3, 33).unsqueeze(1).to(dtype)
    x[5] = 0
    y = integer_compute().linear(x, packed)
    steps = x.double().abs().amax(1, keepdim=True) / 127
    rounded = torch.where(steps > 0, (x.double() / steps).round(), 0.0)
    exact = (rounded * steps) @ packed.dequantize(torch.empty(packed.shape)).double().t()
    errors = (y.double() - exact).norm(dim=1)
    # A number within a rounding of a half may go to the other side: one unit of one column.
    assert (errors <= (TOLERANCES[dtype] + 2e-3) * exact.norm(dim=1)).all()
    assert not y[5].any()


@pytest.mark.parametrize("shape", [(100, 192), (5000, 64), (70, 3000)])
def test_sums_of_integers_are_exact_where_torch_s_are_not(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without VNNI oneDNN's sums saturate. Sums in float32 of few enough products have the same bits as integers'."""
    packed, x = pack(torch.ones(shape) * 3, "int8"), torch.ones(7, shape[1])
    packed.planes[0].copy_(torch.randint(96, 128, shape, generator=torch.Generator().manual_seed(2)))
    monkeypatch.setattr(int8, "has_integer_sums", lambda: False)
    y = integer_compute().linear(x, packed)
    sums = packed.planes[0].long().sum(1) * 127
    assert torch.equal(y, (sums.float() * (1 / torch.tensor(127.0)) * packed.planes[1]).expand(7, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(matmul.WIDENED_ROWS, 37, 576), (501, 49, 10944), (99, 75, 24001)], ids=str)
def test_rows_in_16_bits_are_widened_where_there_is_avx2_alone(
    dtype: torch.dtype, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block, whatever is left over of rows, outputs or columns; sums are in float32, rounded once."""
    num_rows, outputs, columns = shape
    monkeypatch.setattr(matmul, "is_avx2_alone", lambda: True)
    x, weight = gaussian(num_rows, columns, dtype), gaussian(outputs, columns, dtype, seed=1) / columns**0.5
    y = torch.full((num_rows, outputs + 3), torch.nan, dtype=dtype)
    matmul.multiply_rows(x, weight, y[:, 2:-1])
    assert y[:, :2].isnan().all()
    assert y[:, -1].isnan().all()
    exact = x.double() @ weight.double().t()
    assert (y[:, 2:-1].double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


def test_integer_products_cost_what_rounding_to_127_steps_costs() -> None:
    packed = pack(gaussian(256, 1024, torch.bfloat16), "int8")
    x = gaussian(64, 1024, torch.bfloat16, seed=1)
    assert 0.003 < error_of(integer_compute().linear(x, packed), x, packed) < 0.015


def test_an_integer_row_depends_neither_on_its_neighbours_nor_on_its_place() -> None:
    packed = pack(gaussian(192, 512, torch.bfloat16), "int8")
    assert differing_draws(integer_compute(), packed, gaussian(150, 512, torch.bfloat16, seed=2), num_draws=30) == 0


def test_float16_products_do_not_overflow_where_bare_codes_would() -> None:
    packed = pack(torch.full((1, 1024), 0.01, dtype=torch.float16), "int8")
    x = torch.full((20, 1024), 10.0, dtype=torch.float16)
    y = compute_for(packed, torch.float16, False).linear(x, packed)
    torch.testing.assert_close(y, torch.full_like(y, 102.4), rtol=0.01, atol=0)


def differing_draws(compute: ParallelMatmul, packed: PackedTensor, x: Tensor, num_draws: int) -> int:
    """How many random subsets of the rows of `x`, in random order, change the bits of some row's product."""
    generator = torch.Generator().manual_seed(5)
    alone = compute.linear(x, packed)
    count = 0
    for _ in range(num_draws):
        num_rows = int(torch.randint(1, len(x), (1,), generator=generator))
        rows = torch.randperm(len(x), generator=generator)[:num_rows]
        count += not torch.equal(compute.linear(x[rows], packed), alone[rows])
    return count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_deterministic_row_depends_neither_on_its_neighbours_nor_on_its_place(name: str, dtype: torch.dtype) -> None:
    for shape in ((192, 512), (100, 64)):
        packed = packed_as(gaussian(*shape, dtype), name)
        compute = compute_for(packed, dtype, deterministic=True)
        assert differing_draws(compute, packed, gaussian(150, shape[1], dtype, seed=2), num_draws=30) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_deterministic_row_does_not_depend_on_the_number_of_threads(name: str, dtype: torch.dtype) -> None:
    """Neither torch's nor the pool's; the larger matrix is shared out among the pool, the smaller ones are not."""
    for shape in ((100, 64), (48, 192), (1100, 1024)):
        packed = packed_as(gaussian(*shape, dtype), name)
        nbytes = scratch_nbytes(packed.layout, dtype_name(dtype), deterministic=True)
        x = gaussian(40, shape[1], dtype, seed=2)
        products = []
        for num_threads in (1, 2, 3, 4):
            with torch_threads(num_threads):
                compute = ParallelMatmul(
                    Workspace(nbytes), True, helpers=[Workspace(nbytes) for _ in range(num_threads - 1)]
                )
                products.append(compute.linear(x, packed))
        assert all(torch.equal(each, products[0]) for each in products)


def test_deterministic_products_of_large_matrices_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread each, but all of the pool: its workers compute strips of one matrix at the same time."""
    meeting, found = threading.Barrier(3, timeout=30), list[int]()
    multiply = Matmul.multiply_strip

    def met(self: Matmul, *arguments: Any) -> None:
        meeting.wait()
        found.append(torch.get_num_threads())
        multiply(self, *arguments)

    packed = pack(gaussian(1536, 1024, torch.float32), "none")
    nbytes = scratch_nbytes(packed.layout, "float32", deterministic=True)
    compute = ParallelMatmul(Workspace(nbytes), True, helpers=[Workspace(nbytes) for _ in range(2)])
    x = gaussian(5, 1024, torch.float32, seed=1)
    monkeypatch.setattr(Matmul, "multiply_strip", met)
    assert error_of(compute.linear(x, packed), x, packed) < TOLERANCES[torch.float32]
    assert found == [1, 1, 1]


@pytest.mark.parametrize("name", NAMES)
def test_a_deterministic_row_does_not_depend_on_where_its_matrix_lies(name: str) -> None:
    """Held, in a ring, in a checkpoint: addresses differ, by multiples of ALIGNMENT."""
    packed, x = packed_as(gaussian(192, 512, torch.float32), name), gaussian(40, 512, torch.float32, seed=2)
    compute = compute_for(packed, torch.float32, deterministic=True)
    nbytes, room = packed.nbytes, torch.empty(packed.nbytes + 4096, dtype=torch.uint8)
    first = -room.data_ptr() % ALIGNMENT
    for offset in (0, ALIGNMENT, 2 * ALIGNMENT, 15 * ALIGNMENT):
        lying = PackedTensor.bind(packed.layout, room[first + offset : first + offset + nbytes])
        for plane, source in zip(lying.planes, packed.planes, strict=True):
            plane.copy_(source)
        assert torch.equal(compute.linear(x, lying), compute.linear(x, packed)), offset


@pytest.mark.skipif(not bitsandbytes_kernels.has_fused(), reason="bitsandbytes has this kernel for AVX512-BF16 alone")
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_the_fused_product_of_nf4_takes_any_rows_strides_and_matrices(deterministic: bool) -> None:
    """It has nothing but addresses and sizes, and reads codes in one order only."""
    for shape in ((32, 64), (96, 192), (256, 704), (64, 4096)):
        packed = pack(gaussian(*shape, torch.bfloat16), "nf4", NF4PACK)
        compute = ParallelMatmul(Workspace(0), deterministic)
        assert compute.linear(torch.empty(0, shape[1], dtype=torch.bfloat16), packed).shape == (0, shape[0])
        for num_rows in (1, 2, 3, 31, 33, 200):
            room = gaussian(num_rows, shape[1] + 7, torch.bfloat16, seed=num_rows)
            x, out = room[:, 3 : 3 + shape[1]], torch.empty(num_rows, shape[0] + 5, dtype=torch.bfloat16)[:, 1:-4]
            y = compute.linear(x, packed, out=out)
            assert error_of(y, x, packed) < TOLERANCES[torch.bfloat16]
            assert torch.equal(y, compute.linear(x.contiguous(), packed))
            assert torch.equal(y, compute.linear(x.t().contiguous().t(), packed))
        # Nothing is dequantized: the workspace has no bytes.
        with pytest.raises(FormatError, match="workspace of 0 bytes"):
            compute.linear(gaussian(2, shape[1], torch.float32), packed)


def test_without_the_kernel_the_same_codes_are_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may come from another machine."""
    packed, x = pack(gaussian(96, 192, torch.bfloat16), "nf4", NF4PACK), gaussian(40, 192, torch.bfloat16, seed=1)
    monkeypatch.setattr(bitsandbytes_kernels, "has_fused", lambda: False)
    monkeypatch.setattr(tiled, "available", lambda: False)
    assert kernel_order("nf4", torch.bfloat16, "cpu") == "rows"
    for deterministic in (False, True):
        y = compute_for(packed, torch.bfloat16, deterministic).linear(x, packed)
        in_rows = relayout(packed, "rows")
        assert torch.equal(y, compute_for(in_rows, torch.bfloat16, deterministic).linear(x, in_rows))


@pytest.mark.parametrize("num_columns", [16, 24, 40, 64])
def test_a_kernel_that_reads_beyond_odd_rows_is_not_taken(num_columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's int8 kernel reads 16 columns at a time on AVX-512: other widths crashed the process."""
    packed, x = pack(gaussian(48, num_columns, torch.bfloat16), "int8"), gaussian(2, num_columns, torch.bfloat16)
    taken = list[int]()

    def kernel(rows: Tensor, planes: tuple[Tensor, ...]) -> Tensor:
        taken.append(rows.shape[1])
        return rows.float().mm(planes[0].float().t()).mul(planes[1]).to(rows.dtype)

    monkeypatch.setattr(int8, "multiply", kernel)
    y = compute_for(packed, torch.bfloat16, deterministic=False).linear(x, packed)
    assert error_of(y, x, packed) < TOLERANCES[torch.bfloat16]
    assert taken == ([num_columns] if num_columns % 16 == 0 else [])


def test_plain_products_do_depend_on_the_number_of_rows() -> None:
    """The control: without it, tiles might be useless and the test above blind."""
    count = 0
    for dtype in DTYPES:
        packed = pack(gaussian(512, 1024, dtype), "none")
        count += differing_draws(compute_for(packed, dtype, False), packed, gaussian(64, 1024, dtype, seed=2), 10)
    if not count:
        pytest.skip("on this machine plain products happen to be independent of the number of rows")


@pytest.mark.parametrize("name", NAMES)
def test_a_workspace_serves_matrices_of_many_shapes(name: str) -> None:
    small, large = (packed_as(gaussian(rows, 64, torch.float32), name) for rows in (10, 50))
    compute = compute_for(large, torch.float32, deterministic=True)
    x = gaussian(40, 64, torch.float32)
    for packed in (small, large, small):
        assert error_of(compute.linear(x, packed), x, packed) < TOLERANCES[torch.float32]


def test_a_workspace_that_is_too_small_is_refused_with_the_size_it_needs() -> None:
    packed = pack(gaussian(64, 64, torch.float32), "nf4")
    needed = scratch_nbytes(packed.layout, "float32", deterministic=True)
    compute = ParallelMatmul(Workspace(needed - ALIGNMENT), deterministic=True)
    with pytest.raises(FormatError, match=f"workspace of {needed - ALIGNMENT} bytes.* wants {needed}"):
        compute.linear(gaussian(1, 64, torch.float32), packed)


def test_products_leave_the_packed_matrix_and_the_activations_as_they_were() -> None:
    packed = pack(gaussian(64, 64, torch.bfloat16), "int8")
    before = [plane.clone() for plane in packed.planes]
    x = gaussian(40, 64, torch.bfloat16)
    compute_for(packed, torch.bfloat16, True).linear(x, packed)
    assert torch.equal(x, gaussian(40, 64, torch.bfloat16))
    assert all(torch.equal(plane, was) for plane, was in zip(packed.planes, before, strict=True))


def test_small_operations_get_one_thread_and_large_products_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    found: list[int] = []
    monkeypatch.setattr(Matmul, "linear", lambda *args: found.append(torch.get_num_threads()))
    try:
        compute, deterministic = ParallelMatmul(Workspace(0)), ParallelMatmul(Workspace(0), deterministic=True)
        small, large = (PackedTensor.wrap(torch.zeros(rows, 1024)) for rows in (16, 1024))
        for one, numbers in ((compute, FEW_NUMBERS - 1), (compute, FEW_NUMBERS), (deterministic, 1)):
            with one.small_steps(numbers):
                found.append(torch.get_num_threads())
                one.linear(torch.zeros(1, 1024), small)
                one.linear(torch.zeros(1, 1024), large)
                one.parallel_for([0], lambda job, products: found.append(torch.get_num_threads()))
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert found == [1, 1, 3, 3, *[3] * 4, 1, 1, 3, 1], "deterministic strips and experts get one thread each"


def test_many_rows_make_a_small_matrix_a_large_product(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found: list[int] = []
    monkeypatch.setattr(Matmul, "linear", lambda *args: found.append(torch.get_num_threads()))
    try:
        compute = ParallelMatmul(Workspace(0))
        with compute.small_steps(1):
            for num_rows in (1, 1024):
                compute.linear(torch.zeros(num_rows, 64), PackedTensor.wrap(torch.zeros(256, 64)))
    finally:
        torch.set_num_threads(before)
    assert found == [1, 2]
