"""Grouping, computing and combining experts (`moe/expert.py`) agrees with its definition, in whichever order experts
arrive.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.moe.expected_rows import padded_rows
from moedge.moe.expert import (
    ExpertBody,
    ExpertGroups,
    ExpertWeights,
    HeldExperts,
    ResidentExpert,
    combine,
    group_by_expert,
    mix_experts,
)
from moedge.moe.routing_stats import RoutingStats
from moedge.quant.formats.format import TILES
from moedge.quant.kernels.operands import recognise
from moedge.quant.kernels.product import GroupedProduct, Launch
from moedge.quant.matmul.matmul import ParallelMatmul, Workspace
from moedge.quant.matmul.thread_pool import torch_threads
from moedge.quant.tensor import pack

pytestmark = pytest.mark.numerics

T, A, E, D, INNER = 37, 3, 9, 24, 16


@given(st.integers(1, 40), st.integers(1, 4), st.integers(4, 12), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_every_assignment_has_one_row_of_its_expert(tokens: int, per_token: int, experts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    expert_ids = torch.stack([torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)])
    groups = group_by_expert(expert_ids, experts)
    assigned = groups.assignment_rows.view(tokens, per_token)
    assert len(set(groups.assignment_rows.tolist())) == tokens * per_token
    assert (groups.token_ids[assigned] == torch.arange(tokens).unsqueeze(1)).all()
    for expert in range(experts):
        rows = groups.rows(expert)
        mine = assigned[expert_ids == expert]
        assert ((mine >= rows.start) & (mine < rows.stop)).all()
        assert rows.stop - rows.start == padded_rows(len(mine)) >= len(mine)
        assert mine.tolist() == list(range(rows.start, rows.start + len(mine))), "in the order of tokens"
    assert groups.wanted == sorted(set(expert_ids.reshape(-1).tolist()))


def test_no_token_has_no_row() -> None:
    groups = group_by_expert(torch.zeros(0, 2, dtype=torch.int64), 4)
    assert (groups.counts, groups.offsets) == ([0] * 4, (0,) * 5)
    assert (len(groups.token_ids), len(groups.assignment_rows)) == (0, 0)


def test_combine_undoes_the_sort_and_weighs() -> None:
    expert_ids = torch.tensor([[2, 0], [1, 2], [0, 1]])
    weights = torch.tensor([[0.5, 2.0], [1.0, 3.0], [0.25, 4.0]])
    groups = group_by_expert(expert_ids, 3)
    rows = torch.full((len(groups.token_ids), 1), float("nan"))
    for expert in range(3):
        first = groups.rows(expert).start
        rows[first : first + 2] = expert + 1.0
    wanted = ((expert_ids.float() + 1) * weights).sum(1, keepdim=True)
    assert torch.equal(combine(rows, groups.assignment_rows, weights), wanted), "padding rows must not be read"


class ShuffledExperts(HeldExperts):
    """Experts that arrive in an order of their own, one to three together."""

    seed = 0

    def fetch(self, groups: ExpertGroups, hidden: torch.Tensor, rows: torch.Tensor) -> Iterator[list[ResidentExpert]]:
        rng, wanted = random.Random(self.seed), groups.wanted
        rng.shuffle(wanted)
        while wanted:
            together = [wanted.pop() for _ in range(min(len(wanted), rng.randint(1, 3)))]
            yield [ResidentExpert(expert_id, self.experts[expert_id]) for expert_id in together]


def made(source: type[HeldExperts], experts: list[ExpertWeights]) -> HeldExperts:
    return source(0, experts, RoutingStats({0: E}))


def make_experts() -> tuple[torch.Tensor, torch.Tensor, list[ExpertWeights]]:
    torch.manual_seed(3)
    up, down = torch.randn(E, 2 * INNER, D) * 0.2, torch.randn(E, D, INNER) * 0.2
    return up, down, [ExpertWeights(pack(u, "none"), pack(d, "none")) for u, d in zip(up, down, strict=True)]


class CountedProduct(GroupedProduct):
    """The kernel, in Triton's interpreter, and how often it was launched."""

    count = 0

    def launch(self, *arguments: Any, **options: Any) -> Launch:
        self.count += 1
        return super().launch(*arguments, **options)


def matmul_of(size: int, deterministic: bool = False) -> ParallelMatmul:
    workspaces = [Workspace(1 << 20) for _ in range(size)]
    return ParallelMatmul(workspaces[0], deterministic, helpers=workspaces[1:])


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("source", [HeldExperts, ShuffledExperts])
def test_mixing_agrees_with_the_definition(source: type[HeldExperts]) -> None:
    up, down, experts = make_experts()
    hidden = torch.randn(T, D)
    weights, expert_ids = torch.randn(T, E).softmax(-1).topk(A, dim=-1)
    out = mix_experts(hidden, expert_ids, weights, made(source, experts), ExpertBody(gated), matmul_of(2))
    wanted = torch.zeros(T, D, dtype=torch.float64)
    for token in range(T):
        for choice in range(A):
            expert = int(expert_ids[token, choice])
            inner = gated(hidden[token].double() @ up[expert].double().T)
            wanted[token] += weights[token, choice].double() * (inner @ down[expert].double().T)
    assert (out - wanted).norm() / wanted.norm() < 1e-6


def mixed_in_many_orders(deterministic: bool) -> list[torch.Tensor]:
    """One layer, computed in orders 0 to 3 by pools of 1 to 3 with as many threads of torch, and with four."""
    _, _, experts = make_experts()
    hidden = torch.randn(T, D)
    weights, expert_ids = torch.randn(T, E).softmax(-1).topk(A, dim=-1)
    outs = []
    for seed, size, num_threads in ((0, 1, 1), (1, 1, 4), (2, 2, 2), (3, 3, 3), (0, 2, 4)):
        source = made(ShuffledExperts, experts)
        source.seed = seed
        with torch_threads(num_threads):
            compute = matmul_of(size, deterministic)
            with compute.small_steps(T * D):
                outs.append(mix_experts(hidden, expert_ids, weights, source, ExpertBody(gated), compute))
    return outs


def test_the_arrival_order_leaves_no_trace() -> None:
    """`--deterministic`: neither the order nor the number of threads shows in a bit."""
    outs = mixed_in_many_orders(deterministic=True)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_the_arrival_order_shows_in_roundings_at_most() -> None:
    """By default an expert meets as many threads as are free, and products of two threads may have other last bits."""
    outs = mixed_in_many_orders(deterministic=False)
    assert all((out - outs[0]).norm() / outs[0].norm() < 1e-6 for out in outs)


@pytest.mark.sample("True-True-nf4", "False-False-nf4", "True-False-int8", "False-True-none")
@pytest.mark.parametrize("weight_format", ["none", "int8", "nf4"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_experts_in_one_launch_agree_with_one_by_one(weight_format: str, known: bool, bias: bool) -> None:
    torch.manual_seed(5)
    size, inner = 64, 64
    experts = [
        ExpertWeights(
            pack(torch.randn(2 * inner, size) * 0.2, weight_format),
            pack(torch.randn(size, inner) * 0.2, weight_format),
            torch.randn(2 * inner) if bias else None,
            torch.randn(size) if bias else None,
        )
        for _ in range(E)
    ]
    hidden = torch.randn(T, size)
    weights, expert_ids = torch.randn(T, E).softmax(-1).topk(A, dim=-1)
    body = ExpertBody(gated, norm=torch.nn.RMSNorm(size), gate=recognise(gated) if known else None)
    launched = CountedProduct("cpu")
    outs = [
        mix_experts(hidden, expert_ids, weights, made(ShuffledExperts, experts), body, compute)
        for compute in (
            ParallelMatmul(Workspace(1 << 20)),
            ParallelMatmul(Workspace(1 << 20), grouped=launched),
        )
    ]
    assert (launched.count > 1) == known, "the kernel runs where it knows what experts do"
    assert (outs[0] - outs[1]).norm() / outs[0].norm() < 2e-6


def test_a_format_without_a_kernel_goes_one_by_one() -> None:
    product = CountedProduct("cpu")
    nf4, int4, int8 = (pack(torch.randn(64, 64), name).layout for name in ("nf4", "int4", "int8"))
    assert product.takes(nf4, nf4)
    assert not product.takes(pack(torch.randn(64, 64), "int4", TILES).layout)
    assert not product.takes(nf4, int4, int8)
