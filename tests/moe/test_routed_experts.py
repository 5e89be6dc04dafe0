"""A device that groups a pass's tokens itself (`moe/grouping_kernel.py`, `moe/routed_experts.py`) computes what the
host would have had computed, and counts the same.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moedge.moe.expert import ExpertBody, ExpertWeights, HeldExperts, mix_experts
from moedge.moe.grouping_kernel import Grouped, wrong_grouping
from moedge.moe.routed_experts import RoutedExperts
from moedge.moe.routing_stats import RoutingStats
from moedge.quant.formats.format import ROWS, get_format
from moedge.quant.kernels.operands import ACTIVATIONS, Gate
from moedge.quant.kernels.product import GroupedProduct
from moedge.quant.matmul.matmul import ParallelMatmul, Workspace
from moedge.quant.matmul.selftest import random_matrix


def choices(tokens: int, experts: int, per_token: int, seed: int = 0) -> torch.Tensor:
    """Skewed, as routers choose: some experts by nobody, one by nearly all."""
    generator = torch.Generator().manual_seed(seed)
    likely = torch.rand(tokens, experts, generator=generator) ** 0.2 * torch.linspace(1, 0.5, experts)
    likely[:, experts // 2] = 0.0 if seed % 2 else 2.0
    return likely.topk(per_token, dim=1).indices


# Experts and experts of a token of gpt-oss, Qwen3-30B-A3B, Qwen3-Next; more tokens than one chunk of choices; and one.
@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "height"),
    [
        *((37, 32, 4, 16), (1, 60, 1, 32), (700, 5, 3, 16)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((3, 128, 8, 16), (150, 128, 8, 64), (2, 512, 10, 16))
        ),
    ],
)
def test_choices_are_sorted_by_expert(tokens: int, experts: int, per_token: int, height: int) -> None:
    ids = choices(tokens, experts, per_token)
    totals = torch.ones(2, experts + 1, dtype=torch.int64)
    grouped = Grouped.of(ids, totals, height)
    counts = np.bincount(ids.view(-1), minlength=experts)
    order = np.argsort(ids.view(-1).numpy(), kind="stable")
    assert grouped.token_ids.tolist() == (order // per_token).tolist()
    assert grouped.rows[order].tolist() == list(range(len(order)))
    ends = np.cumsum(counts)
    wanted = [
        (expert, first, min(first + height, ends[expert]))
        for expert in range(experts)
        for first in range(ends[expert] - counts[expert], ends[expert], height)
    ]
    assert grouped.tiles.tiles is not None
    found = [tuple(tile) for tile in grouped.tiles.tiles.tolist()]
    assert found[: len(wanted)] == wanted
    assert set(found[len(wanted) :]) <= {(0, 0, 0)}
    assert totals.tolist() == [[*(counts + 1).tolist(), len(ids) + 1], [*((counts > 0) + 1).tolist(), 2]]


def layer(quant: str, experts: int, hidden: int, inner: int, bias: bool) -> list[ExpertWeights]:
    chosen = get_format(quant).in_order(ROWS)
    up, down = chosen.layout((2 * inner, hidden), "bfloat16"), chosen.layout((hidden, inner), "bfloat16")
    biases = [torch.randn(rows).bfloat16() if bias else None for rows in (2 * inner, hidden) * experts]
    return [
        ExpertWeights(random_matrix(up, 2 * at), random_matrix(down, 2 * at + 1), *biases[2 * at : 2 * at + 2])
        for at in range(experts)
    ]


def routed(held: HeldExperts, body: ExpertBody, compute: ParallelMatmul) -> RoutedExperts:
    assert compute.grouped is not None
    found = RoutedExperts.of(held, body, compute.grouped)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("quant", "bias", "norm"),
    [("nf4", False, False), ("mxfp4", True, False), ("int4", False, True), ("none", True, True)],
)
def test_a_device_mixes_as_the_host_has_it_mixed(quant: str, bias: bool, norm: bool) -> None:
    gate = Gate("clamped_swiglu", alternating=True) if bias else Gate("silu")

    def activate(both: torch.Tensor) -> torch.Tensor:
        halves = (both[:, ::2], both[:, 1::2]) if gate.alternating else both.chunk(2, 1)
        return ACTIVATIONS[gate.activation](*halves)

    body = ExpertBody(activate, torch.nn.RMSNorm(192) if norm else None, gate)
    experts = layer(quant, 6, 192, 128, bias)
    ids = choices(21, 6, 2)
    weights = torch.rand(21, 2)
    hidden = torch.randn(21, 192)
    compute = ParallelMatmul(Workspace(1 << 20), grouped=GroupedProduct("cpu"))
    by_device, by_host = RoutingStats({3: 6}), RoutingStats({3: 6})
    with torch.inference_mode():
        found = routed(HeldExperts(3, experts, by_device), body, compute).mix(hidden, ids, weights, compute)
        wanted = mix_experts(hidden, ids, weights, HeldExperts(3, experts, by_host), replace(body, gate=None), compute)
    assert torch.allclose(found, wanted, rtol=2e-4, atol=2e-4 * float(wanted.abs().max()))
    one, other = by_device.layers[3], by_host.layers[3]
    assert (one.chosen == other.chosen).all()
    assert (one.tokens, one.passes, one.unions) == (other.tokens, other.passes, other.unions)
    # Counted once.
    assert (by_device.layers[3].chosen == other.chosen).all()


def test_the_host_groups_what_no_kernel_takes() -> None:
    compute = ParallelMatmul(Workspace(1 << 20), grouped=GroupedProduct("cpu"))
    assert compute.grouped is not None
    held = HeldExperts(0, layer("nf4", 2, 64, 64, bias=False), RoutingStats({0: 2}))
    assert RoutedExperts.of(held, ExpertBody(torch.tanh), compute.grouped) is None
    odd = HeldExperts(0, layer("none", 1, 60, 64, bias=False), RoutingStats({0: 1}))
    assert RoutedExperts.of(odd, ExpertBody(torch.tanh, gate=Gate("silu")), compute.grouped) is None


def test_a_token_of_the_neighbour_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = choices(9, 4, 2)
    grouped = Grouped.of(ids, torch.zeros(2, 4, dtype=torch.int64), 16)
    swapped = grouped._replace(token_ids=grouped.token_ids.roll(1))
    body = ExpertBody(torch.tanh, gate=Gate("silu"))
    hidden, weights = torch.randn(9, 64), torch.rand(9, 2)
    experts = layer("int8", 4, 64, 64, bias=False)
    compute = ParallelMatmul(Workspace(1 << 20), grouped=GroupedProduct("cpu"))
    found = []
    for each in (grouped, swapped):
        monkeypatch.setattr(Grouped, "of", lambda *_, each=each: each)
        held = HeldExperts(0, experts, RoutingStats({0: 4}))
        found.append(routed(held, body, compute).mix(hidden, ids, weights, compute))
    assert not torch.allclose(*found, rtol=1e-2)


def test_a_device_that_groups_wrongly_fails_its_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_grouping(torch.device("cpu")) == ""
    of = Grouped.of
    monkeypatch.setattr(Grouped, "of", lambda *given: of(*given)._replace(rows=of(*given).rows.roll(1)))
    assert wrong_grouping(torch.device("cpu")) == "grouping of 300 tokens by expert"
