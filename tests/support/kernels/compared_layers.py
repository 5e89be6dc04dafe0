"""Experts, routers, norms, heads and attention of layers against float64, in published sizes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from moedge.quant.formats.format import INTEGER_CODES, TILES, get_format
from moedge.quant.kernels.operands import ACTIVATIONS, Gate
from moedge.quant.kv.format import KV_FORMATS
from moedge.quant.matmul import steps, tiled
from moedge.quant.matmul.matmul import ParallelMatmul, Workspace
from moedge.quant.matmul.steps import HeadRows, NormWeight, Routed, Step, Steps
from moedge.quant.matmul.thread_pool import WorkerPool
from moedge.quant.tensor import PackedTensor, pack

from ..published_widths import EXPERTS, GROUP_SIZES, HEAD_DIMS, widths
from .native_rows import Rows

_FORMATS = ("int8", "int4", "nf4", "mxfp4")
# Half a step of bfloat16, of the larger of two numbers.
_HALF = 0.51 * torch.finfo(torch.bfloat16).eps


def _numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def _distance(found: Tensor, wanted: Tensor, allowed: Tensor | float) -> float:
    """The largest difference as a multiple of what is allowed; infinite where numbers are NaN."""
    return float(((found.double() - wanted).abs() / (wanted.abs() * _HALF + allowed)).max().nan_to_num(torch.inf))


class Experts(NamedTuple):
    """`counts` rows of each expert [2 inner, width] and [width, inner]."""

    format: str
    width: int
    inner: int
    counts: tuple[int, ...]
    gate: Gate
    integer: bool
    biased: bool


@st.composite
def expert_cases(draw: st.DrawFn) -> Experts:
    name = draw(st.sampled_from(_FORMATS))
    # Whole tiles of both matrices.
    width, inner = draw(widths(64, 3072)), draw(widths(32 if name != "nf4" else 64, 3072))
    gate = Gate(draw(st.sampled_from(sorted(ACTIVATIONS))), draw(st.booleans()))
    counts = draw(st.lists(st.sampled_from([1, 2, 5, 13, 25, 40, 129]), min_size=1, max_size=3))
    return Experts(name, width, inner, tuple(counts), gate, draw(st.booleans()), draw(st.booleans()))


def compare_experts(case: Experts) -> float:
    """Experts in one call of the library."""
    rows = sum(case.counts)
    hidden, ids = _numbers(11, case.width), torch.arange(rows) % 11
    experts, first = [], 0
    for seed, count in enumerate(case.counts):
        up, down = _expert(case, seed)
        biases = [_numbers(len_, seed=seed) if case.biased else None for len_ in (2 * case.inner, case.width)]
        experts.append(tiled.ExpertRows(first, count, up, biases[0], down, biases[1]))
        first += count
    out = torch.full((rows, case.width), float("nan")).bfloat16()
    compute = ParallelMatmul(Workspace(1 << 21), integer=case.integer, helpers=[Workspace(1 << 20)])
    assert compute.experts(hidden, ids, experts, case.gate, out), "the library computes such experts"
    worst = 0.0
    for one in experts:
        part = slice(one.first, one.first + one.num_rows)
        worst = max(worst, _expert_distance(out[part], hidden[ids[part]].double(), one, case))
    return worst


def _expert(case: Experts, seed: int) -> tuple[PackedTensor, PackedTensor]:
    up = _numbers(2 * case.inner, case.width, seed=seed, scale=case.width**-0.5)
    down = _numbers(case.width, case.inner, seed=seed + 50, scale=case.inner**-0.5)
    return pack(up, case.format, TILES), pack(down, case.format, TILES)


def _expert_distance(found: Tensor, x: Tensor, one: tiled.ExpertRows, case: Experts) -> float:
    up, down = (each.dequantize(torch.empty(each.shape)).double() for each in (one.up, one.down))
    inner = x @ up.t() + (0 if one.up_bias is None else one.up_bias.double())
    pairs = (inner[:, ::2], inner[:, 1::2]) if case.gate.alternating else inner.chunk(2, 1)
    middle = ACTIVATIONS[case.gate.activation](*pairs)
    wanted = middle @ down.t() + (0 if one.down_bias is None else one.down_bias.double())
    spread = (middle.square() @ down.square().t()).sqrt()
    # Inner numbers are rounded to bfloat16, or to integers of which the largest of 32 is 127, as the inputs were.
    integer = case.integer and get_format(case.format).codes in INTEGER_CODES
    size = middle.square().mean(1, keepdim=True).sqrt() * down.square().sum(1).sqrt()
    return _distance(found, wanted, 0.02 * spread + (0.3 if integer else 0.03) * size)


class Mixture(NamedTuple):
    """Rows that choose `chosen` of `experts` experts each, so that some experts have many rows."""

    rows: int
    experts: int
    chosen: int
    width: int
    inner: int


@st.composite
def mixture_cases(draw: st.DrawFn) -> Mixture:
    experts, chosen = draw(st.sampled_from([each for each in EXPERTS if each[0] <= 64]))
    rows = draw(st.sampled_from([1, 4, 30, 65]) | st.integers(1, 60))
    few = draw(st.booleans())
    # With few experts, one has more rows than are multiplied together.
    return Mixture(300 if few else rows, 3 if few else experts, 2 if few else chosen, draw(widths(64, 576)),
                   draw(widths(32, 448)))  # fmt: skip


def compare_mixtures(case: Mixture) -> float:
    """The steps that group rows by expert, compute experts and add up their results, as layers run them."""
    rows, width = case.rows, case.width
    hidden, residual = _numbers(rows, width), _numbers(rows, width, seed=1)
    matrices = [
        (pack(_numbers(2 * case.inner, width, seed=seed, scale=width**-0.5), "int8", TILES), None,
         pack(_numbers(width, case.inner, seed=seed + 90, scale=case.inner**-0.5), "int8", TILES), None)
        for seed in range(case.experts)
    ]  # fmt: skip
    scores = torch.rand(rows, case.experts, generator=torch.Generator().manual_seed(rows))
    # The first expert is a favourite.
    scores[:, 0] += 0.4
    weights, ids = scores.softmax(1).topk(case.chosen)
    routed = _routed(rows, case.chosen, case.experts)._replace(ids=ids.contiguous(), weights=weights.contiguous())
    table, outputs = steps.experts_table(matrices), _numbers(rows * case.chosen, width)
    scratch = torch.empty(rows * case.chosen * steps.expert_row_nbytes(matrices[0]), dtype=torch.uint8)
    out, combining = torch.full_like(hidden, float("nan")), steps.combine(outputs, residual, routed)
    combining.out = out.data_ptr()
    mixing = steps.mixture(hidden, routed, table, Gate("silu"), outputs, scratch)
    _run([*mixing, Step(combining)], rows)
    wanted, size = residual.double(), torch.zeros(rows, 1, dtype=torch.float64)
    for index, (up, _, down, _) in enumerate(matrices):
        weight = (weights * (ids == index)).sum(1, keepdim=True).double()
        if not weight.any():
            continue
        first, second = (each.dequantize(torch.empty(each.shape)).double() for each in (up, down))
        gate, value = (hidden.double() @ first.t()).chunk(2, 1)
        part = (silu(gate) * value) @ second.t()
        wanted += weight * part
        size += weight * part.square().mean(1, keepdim=True).sqrt()
    return _distance(out, wanted, 0.04 * size)


def _routed(rows: int, chosen: int, count: int) -> Routed:
    ids, token_ids, assignment_rows = (torch.full((rows, chosen), -1) for _ in range(3))
    return Routed(ids, torch.empty(rows, chosen), torch.empty(count, dtype=torch.int64), token_ids, assignment_rows)


def _run(given: list[Step], rows: int, threads: int = 2) -> None:
    Steps(given).run(rows, WorkerPool(threads).call_on_all)


class Norm(NamedTuple):
    """RMSNorm of rows of this width, of a sum where it `adds`."""

    rows: int
    width: int
    plus_one: bool
    adds: bool


def norm_cases() -> st.SearchStrategy[Norm]:
    return st.builds(Norm, st.integers(1, 40), widths(32), st.booleans(), st.booleans())


def compare_norms(case: Norm) -> float:
    x, added = _numbers(case.rows, case.width), _numbers(case.rows, case.width, seed=1)
    weight = NormWeight(_numbers(case.width, seed=2), 1e-5, case.plus_one)
    total, out = torch.zeros_like(x), torch.full_like(x, float("nan"))
    _run([Step(steps.norm(x, added if case.adds else None, total, weight, out))], case.rows)
    meant = (x + added if case.adds else x).double()
    wanted = meant * (meant.square().mean(1, keepdim=True) + 1e-5).rsqrt() * (weight.weight.double() + case.plus_one)
    return _distance(out, wanted, 1e-5)


class Gating(NamedTuple):
    """The activation of a dense layer with this inner width."""

    rows: int
    width: int
    activation: str


def gating_cases() -> st.SearchStrategy[Gating]:
    return st.builds(Gating, st.integers(1, 9), widths(32), st.sampled_from(sorted(ACTIVATIONS)))


def compare_gates(case: Gating) -> float:
    gate, up = (_numbers(case.rows, case.width, seed=seed, scale=4) for seed in (0, 1))
    wanted = ACTIVATIONS[case.activation](gate.double(), up.double())
    _run([Step(steps.gate(gate, up, case.activation))], case.rows)
    return _distance(gate, wanted, 1e-4)


class Router(NamedTuple):
    """Scores of `experts` experts for rows of this width, of which `chosen` are taken."""

    rows: int
    experts: int
    chosen: int
    width: int
    normalised: bool


@st.composite
def router_cases(draw: st.DrawFn) -> Router:
    experts, chosen = draw(st.sampled_from(EXPERTS) | st.tuples(st.integers(1, 70), st.integers(1, 9)))
    return Router(draw(st.integers(1, 70)), experts, min(experts, chosen), draw(widths(32, 3072)), draw(st.booleans()))


def compare_routers(case: Router) -> float:
    x, weight = _numbers(case.rows, case.width), _numbers(case.experts, case.width, seed=1, scale=case.width**-0.5)
    routed = _routed(case.rows, case.chosen, case.experts)
    logits = torch.full((case.rows, case.experts), float("nan"))
    choosing = steps.choose(logits, routed.ids, routed.weights, case.normalised)
    _run([Step(steps.router(x, weight, logits)), Step(choosing)], case.rows)
    exact = x.double() @ weight.double().t()
    best = logits.double().softmax(-1).topk(case.chosen, -1)
    if not torch.equal(logits.double().softmax(-1).gather(1, routed.ids.clamp(0, case.experts - 1)), best.values):
        return float("inf")
    wanted = best.values / best.values.sum(-1, keepdim=True) if case.normalised else best.values
    return max(_distance(logits, exact, 1e-4), float((routed.weights.double() - wanted).abs().max()) / 1e-5)


class Heads(NamedTuple):
    """Query heads of KV heads of `dim` elements, the first `rotary` of which are turned."""

    rows: int
    kv_heads: int
    group: int
    dim: int
    rotary: int
    normed: bool


@st.composite
def head_cases(draw: st.DrawFn) -> Heads:
    # What fused layers take: whole vectors of 32 elements.
    dim = draw(st.sampled_from([each for each in HEAD_DIMS if each % 32 == 0]))
    rotary = draw(st.sampled_from(range(32, dim + 1, 32)))
    return Heads(draw(st.integers(1, 9)), draw(st.integers(1, 6)), draw(st.sampled_from(GROUP_SIZES)), dim, rotary,
                 draw(st.booleans()))  # fmt: skip


def compare_heads(case: Heads) -> float:
    """Norms and rotary embedding of queries and keys, and what is stored in the cache."""
    rows, dim, block = case.rows, case.dim, 8
    q, k, v = (
        _numbers(rows, count, dim, seed=count) for count in (case.kv_heads * case.group, case.kv_heads, case.kv_heads)
    )
    cos, sin = (_numbers(rows, case.rotary, seed=seed, scale=0.5) for seed in (5, 6))
    norms = [NormWeight(_numbers(dim, seed=seed), 1e-6, False) if case.normed else None for seed in (7, 8)]
    meant = [_turned(x.double(), norm, cos, sin) for x, norm in zip((q, k), norms, strict=True)]
    slots = torch.randperm(rows + 5, generator=torch.Generator().manual_seed(1))[:rows]
    cache = torch.zeros(2, (rows + 12) // block, case.kv_heads, block, dim, dtype=torch.bfloat16)
    arguments = steps.heads(HeadRows(q, norms[0]), HeadRows(k, norms[1]), v, case.rotary, block)
    arguments.cos, arguments.sin, arguments.slots = cos.data_ptr(), sin.data_ptr(), slots.data_ptr()
    arguments.key_codes, arguments.value_codes = cache[0].data_ptr(), cache[1].data_ptr()
    _run([Step(arguments)], rows)
    right = all(
        torch.equal(held[slots // block, :, slots % block], side) for held, side in zip(cache, (k, v), strict=True)
    )
    worst = max(_distance(found, exact, 1e-5) for found, exact in zip((q, k), meant, strict=True))
    return worst if right else float("inf")


def _turned(x: Tensor, norm: NormWeight | None, cos: Tensor, sin: Tensor) -> Tensor:
    if norm is not None:
        x = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    rotary = cos.shape[1]
    turned, rest = x[..., :rotary], x[..., rotary:]
    first, second = turned.chunk(2, -1)
    other = torch.cat([-second, first], -1)
    return torch.cat([turned * cos.double()[:, None] + other * sin.double()[:, None], rest], -1)


class Attended(NamedTuple):
    """Last tokens of sequences of these lengths attend to all before them."""

    kv_format: str
    kv_heads: int
    group: int
    dim: int
    lengths: tuple[int, ...]
    block: int
    dtype: torch.dtype
    window: int | None


@st.composite
def attention_cases(draw: st.DrawFn) -> Attended:
    lengths = st.lists(st.sampled_from([1, 2, 15, 17, 33, 75, 255, 257, 300, 530]), min_size=1, max_size=3)
    # In bfloat16 twice as often: only there are products of bfloat16 and of integers.
    dtypes = st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float32, torch.float16])
    return Attended(
        draw(st.sampled_from(KV_FORMATS)), draw(st.integers(1, 3)), draw(st.sampled_from(GROUP_SIZES)),
        draw(st.sampled_from(HEAD_DIMS)), tuple(draw(lengths)), draw(st.sampled_from([16, 32, 100])),
        draw(dtypes), draw(st.sampled_from([None, None, 7, 128])),
    )  # fmt: skip


def compare_attention(case: Attended) -> float:
    """By row and head, so that one wrong head of many shows."""
    shape = (case.kv_heads * case.group, case.kv_heads, case.dim)
    rows = Rows.make(shape, case.kv_format, list(case.lengths), case.block, case.dtype, window=case.window)
    wanted = rows.wanted()
    allowed = {torch.float32: 6e-6, torch.float16: 2e-3, torch.bfloat16: 0.03}[case.dtype]
    # Values are about 0.2 wherever many keys are averaged, and their differences small.
    errors = (rows.run().double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    return float(errors.max().nan_to_num(torch.inf)) / allowed
