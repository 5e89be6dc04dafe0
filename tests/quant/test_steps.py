"""Steps of decoder layers that the library runs in one call: what they compute, and on which bits it depends."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moedge.moe.expert import group_by_expert
from moedge.quant.formats.format import TILES
from moedge.quant.kernels.operands import Gate
from moedge.quant.matmul import steps
from moedge.quant.matmul.steps import HeadRows, NormWeight, Routed, Step, Steps
from moedge.quant.matmul.thread_pool import WorkerPool
from moedge.quant.matmul.tiled import ExpertMatrices, has_kernel, native_product
from moedge.quant.native import build
from moedge.quant.scratch import row_nbytes
from moedge.quant.tensor import PackedTensor, pack

pytestmark = [
    pytest.mark.numerics,
    pytest.mark.skipif(not has_kernel(), reason="the library of CPU kernels is not usable here"),
]

DRIVER = Path(__file__).parents[1] / "native" / "steps.cpp"
# Rounding of bfloat16 results, two of them one after the other.
TOLERANCE = 8e-3
ROWS = st.integers(1, 40) | st.sampled_from([64, 65, 129, 200])


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def run(given_steps: list[Step], rows: int, threads: int) -> None:
    Steps(given_steps).run(rows, WorkerPool(threads).call_on_all)


def error_of(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@given(ROWS, st.integers(1, 5), st.booleans(), st.booleans(), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_norms_add_what_comes_before_them(rows: int, width: int, plus_one: bool, adds: bool, threads: int) -> None:
    x, added = numbers(rows, 32 * width), numbers(rows, 32 * width, seed=1)
    weight = NormWeight(numbers(32 * width, seed=2), 1e-5, plus_one)
    total, out = torch.zeros_like(x), torch.empty_like(x)
    run([Step(steps.norm(x, added if adds else None, total, weight, out))], rows, threads)
    if adds:
        assert torch.equal(total, x + added)
    meant = rms(x + added if adds else x, weight.weight.double() + plus_one, 1e-5)
    assert error_of(out, meant) < TOLERANCE
    alone = torch.empty_like(x[:1])
    last = (added[-1:] if adds else None, total[:1].clone())
    run([Step(steps.norm(x[-1:], *last, weight, alone))], 1, 1)
    assert torch.equal(alone[0], out[-1]), "a row's bits depend on the row alone"


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [T, H, D] in float64, their first elements turned by [T, rotary]."""
    rotary = cos.shape[1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    first, second = turned.chunk(2, -1)
    other = torch.cat([-second, first], -1)
    return torch.cat([turned * cos.double()[:, None] + other * sin.double()[:, None], rest], -1)


@given(ROWS, st.integers(1, 3), st.sampled_from([(64, 64), (64, 32), (128, 128)]), st.booleans(), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_heads_are_normed_rotated_and_stored(
    rows: int, kv_heads: int, sizes: tuple[int, int], normed: bool, threads: int
) -> None:
    (dim, rotary), block = sizes, 8
    q, k, v = (numbers(rows, count, dim, seed=count) for count in (2 * kv_heads, kv_heads, kv_heads + 0))
    cos, sin = (numbers(rows, rotary, seed=seed, scale=0.5) for seed in (5, 6))
    norms = [NormWeight(numbers(dim, seed=seed), 1e-6, False) if normed else None for seed in (7, 8)]
    wide = [
        x.double() if norm is None else rms(x, norm.weight.double(), norm.eps)
        for x, norm in zip((q, k), norms, strict=True)
    ]
    meant = [rotated(x, cos, sin) for x in wide]
    slots = torch.randperm(rows + 5, generator=torch.Generator().manual_seed(1))[:rows]
    cache = torch.zeros(2, (rows + 12) // block, kv_heads, block, dim, dtype=torch.bfloat16)
    arguments = steps.heads(HeadRows(q, norms[0]), HeadRows(k, norms[1]), v, rotary, block)
    arguments.cos, arguments.sin, arguments.slots = cos.data_ptr(), sin.data_ptr(), slots.data_ptr()
    arguments.key_codes, arguments.value_codes = cache[0].data_ptr(), cache[1].data_ptr()
    run([Step(arguments)], rows, threads)
    assert all(error_of(found, exact) < TOLERANCE for found, exact in zip((q, k), meant, strict=True))
    for stored, side in zip(cache, (k, v), strict=True):
        assert torch.equal(stored[slots // block, :, slots % block], side)
        assert stored.count_nonzero() == side.count_nonzero(), "nothing else is written"


def routed_of(rows: int, chosen: int, count: int) -> Routed:
    ids, token_ids, assignment_rows = (torch.full((rows, chosen), -1) for _ in range(3))
    return Routed(ids, torch.empty(rows, chosen), torch.empty(count, dtype=torch.int64), token_ids, assignment_rows)


@given(ROWS, st.integers(1, 19), st.integers(1, 5), st.booleans(), st.integers(1, 3), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_routers_choose_the_largest(
    rows: int, count: int, chosen: int, normalised: bool, threads: int, seed: int
) -> None:
    chosen = min(chosen, count)
    x, weight, routed = numbers(rows, 64, seed=seed), numbers(count, 64, seed=seed + 1), routed_of(rows, chosen, count)
    logits = torch.empty(rows, count)
    choosing = steps.choose(logits, routed.ids, routed.weights, normalised)
    run([Step(steps.router(x, weight, logits)), Step(choosing)], rows, threads)
    exact = x.double() @ weight.double().t()
    assert error_of(logits, exact) < 1e-5
    found = logits.double().softmax(-1)
    best = found.topk(chosen, -1)
    assert torch.equal(found.gather(1, routed.ids), best.values)
    wanted = best.values / best.values.sum(-1, keepdim=True) if normalised else best.values
    assert torch.allclose(routed.weights.double(), wanted, rtol=1e-5, atol=1e-7)


def test_of_equal_logits_the_first_experts_are_chosen() -> None:
    routed = routed_of(1, 3, 8)
    logits = torch.tensor([[1.0, 2, 2, 0, 2, 2, 1, 2]])
    run([Step(steps.choose(logits, routed.ids, routed.weights, True))], 1, 1)
    assert routed.ids.tolist() == [[1, 2, 4]]
    assert torch.allclose(routed.weights, torch.full((1, 3), 1 / 3))


def tiles(weight: Tensor) -> PackedTensor:
    return pack(weight, "int4", TILES)


def experts_of(count: int) -> list[ExpertMatrices]:
    return [
        (tiles(numbers(128, 64, seed=seed) / 8), None, tiles(numbers(64, 64, seed=seed + 50) / 8), None)
        for seed in range(count)
    ]


def mix(
    hidden: Tensor, ids: Tensor, weights: Tensor, experts: list[ExpertMatrices], threads: int
) -> tuple[Tensor, Routed]:
    rows, chosen = ids.shape
    routed = routed_of(rows, chosen, len(experts))._replace(ids=ids, weights=weights)
    table, outputs, out = steps.experts_table(experts), hidden.new_empty(rows * chosen, 64), torch.empty_like(hidden)
    scratch = torch.empty(rows * chosen * steps.expert_row_nbytes(experts[0]), dtype=torch.uint8)
    combining = steps.combine(outputs, hidden, routed)
    combining.out = out.data_ptr()
    mixing = steps.mixture(hidden, routed, table, Gate("silu"), outputs, scratch)
    run([*mixing, Step(combining)], rows, threads)
    return out, routed


@pytest.mark.parametrize(("rows", "count", "chosen"), [(1, 5, 3), (9, 3, 2), (40, 7, 4), (300, 2, 2)])
def test_mixtures_agree_with_float64_whatever_the_neighbours_and_threads(rows: int, count: int, chosen: int) -> None:
    experts, hidden = experts_of(count), numbers(rows, 64, scale=3)
    ids = torch.stack(
        [torch.randperm(count - 1)[:chosen] if chosen < count else torch.arange(chosen) for _ in range(rows)]
    )
    weights = torch.rand(rows, chosen)
    out, routed = mix(hidden, ids, weights, experts, 3)
    assert routed.counts.tolist() == group_by_expert(ids, count).counts
    assert torch.equal(
        routed.token_ids.view(-1)[routed.assignment_rows.view(-1)], torch.arange(rows).repeat_interleave(chosen)
    )
    exact = hidden.double()
    for row, token in enumerate(exact.clone()):
        for expert, weight in zip(ids[row].tolist(), weights[row].double(), strict=True):
            up, _, down, _ = (each and each.dequantize(torch.empty(each.shape)).double() for each in experts[expert])
            gate, value = (up @ token).chunk(2)
            exact[row] += weight * (down @ (torch.nn.functional.silu(gate) * value))
    assert error_of(out, exact) < 2 * TOLERANCE
    alone, _ = mix(hidden[-1:].contiguous(), ids[-1:].clone(), weights[-1:].clone(), experts, 1)
    assert torch.equal(alone[0], out[-1])


@pytest.mark.parametrize("rows", [128, 129, 260, 1000])
def test_products_of_many_rows_have_the_bits_of_few(rows: int) -> None:
    """Rows are multiplied in blocks, whose inputs stay in a core's cache."""
    x, matrix = numbers(rows, 96), tiles(numbers(64, 96, seed=1) / 8)
    found, scratch = x.new_empty(rows, 64), torch.empty(rows * row_nbytes(96), dtype=torch.uint8)
    run([Step(native_product(x, matrix, None, found, scratch))], rows, 3)
    meant = torch.empty_like(found)
    for first in range(0, rows, 50):
        some, out = x[first : first + 50], meant[first : first + 50]
        run([Step(native_product(some, matrix, None, out, scratch))], len(some), 1)
    assert torch.equal(found, meant)


def test_steps_wait_for_those_before_them() -> None:
    """A chain of products, each of which reads what the one before wrote, often and on more threads than processors."""
    matrices = [pack(numbers(128, 128, seed=seed) / 4, "int4", TILES) for seed in range(6)]
    assert all(matrix.layout.order == TILES for matrix in matrices)
    buffers = [numbers(5, 128), *(torch.empty(5, 128, dtype=torch.bfloat16) for _ in matrices)]
    scratch = torch.empty(5 * row_nbytes(128), dtype=torch.uint8)
    chain = Steps(
        [
            Step(native_product(x, matrix, None, y, scratch))
            for x, matrix, y in zip(buffers, matrices, buffers[1:], strict=False)
        ]
    )
    pool, found = WorkerPool(4), set()
    for _ in range(200):
        chain.run(5, pool.call_on_all)
        found.add(bytes(buffers[-1].view(torch.uint8).numpy()))
    chain.run(5, lambda call: call())
    assert found == {bytes(buffers[-1].view(torch.uint8).numpy())}


def test_an_error_on_one_thread_is_raised_when_all_have_ended() -> None:
    called: list[int] = []

    def fail() -> None:
        called.append(1)
        raise ValueError

    with pytest.raises(ValueError):
        WorkerPool(3).call_on_all(fail)
    assert len(called) == 3


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_steps_run_clean_under_sanitizers(sanitizers: str, tmp_path: Path) -> None:
    """Without Python and torch: a layer around attention, one thread against three, in memory of exact size."""
    flags = ("-std=c++17", "-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all")
    objects, driver = build.compile_objects(tmp_path, flags), tmp_path / "steps"
    command = [build.COMPILER, *flags, "-I", str(build.HERE), str(DRIVER), *objects, "-lpthread", "-o", str(driver)]
    subprocess.run(command, check=True)
    environment = os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run([driver, "8"], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
