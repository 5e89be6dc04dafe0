"""What passes cost the host of a device (`runtime/engine/`, `runtime/model/`, `moe/expert.py`) may only go down: its
waits, the copies and the kernels that it starts, and the functions of Python that every sequence takes.

The figures in host_cost.json are ceilings, of a qwen3_moe of three layers and eight experts in nf4 over keys in int8,
three prompts: bench/results/gpu.md explains them. They change in one direction, in the commit that lowers them.
"""

import json
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moedge.moe import expert
from moedge.moe.streaming_mode import Mode
from moedge.quant.kernels.upload import open_ring
from moedge.runtime.attention.protocol import AttentionCall, Division, PassPages
from moedge.runtime.plan import presets
from moedge.runtime.plan.candidate import SAMPLER_NBYTES
from moedge.runtime.plan.planner import Settings
from moedge.runtime.sampling.draw import Draw
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.sampling.sampler import Sampler
from moedge.runtime.source.model_source import open_source
from support.device.sequence_cost import calls_per_sequence
from support.tiny_families import build_tokenizer, tiny_config

RECORDED = Path(__file__).with_name("host_cost.json")
AMPERE, NO_KERNELS = (8, 6), (7, 0)
# Capability, share of the weights that is held, mode of the experts that stream.
WAYS: dict[str, tuple[tuple[int, int], float, Mode | None]] = {
    "held": (AMPERE, 1.0, None),
    "held, graphs": (AMPERE, 1.0, None),
    "all": (AMPERE, 0.0, Mode.ALL),
    "wanted": (AMPERE, 0.0, Mode.WANTED),
    "wanted+forecast": (AMPERE, 0.0, Mode.FORECAST),
    "held, no kernels": (NO_KERNELS, 1.0, None),
}
# Launches of a norm or a router are transformers' and torch's: with others than those that were counted, so much more.
OTHER_VERSIONS = 1.25
LAYERS = 3
Figures = dict[str, dict[str, Any]]


def recorded() -> Any:
    return json.loads(RECORDED.read_text())


@pytest.fixture(scope="module")
def count(
    tmp_path_factory: pytest.TempPathFactory, fakes: ModuleType, host_cost: ModuleType, tiny_engine: ModuleType
) -> Iterator[Callable[[str], Figures]]:
    """`count(way)` are the figures of a run."""
    from transformers import Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("qwen3_moe")
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(tiny_config("qwen3_moe", num_hidden_layers=LAYERS)).save_pretrained(folder)
    build_tokenizer(folder, 384)
    settings = Settings(dtype="bf16", quant="nf4", kv="int8", tokens_per_pass=64, max_sequences=3)
    with ExitStack() as opened:
        source = opened.enter_context(open_source(str(folder)))
        case = tiny_engine.Case(source, folder, settings, lengths=(2, 5, 3), new_tokens=8)

        def run(way: str) -> Figures:
            capability, share, mode = WAYS[way]
            fake = fakes.FakeDevice(capability=capability)
            plan = case.plan(fake.device, share)
            if way != "held, graphs":
                plan = replace(plan, graphs_nbytes=0)
            assert plan.grouped_products == (capability == AMPERE)
            assert (plan.held_nbytes < plan.weights_nbytes) == (share < 1)
            with host_cost.HostCost(fake, fakes) as costs:
                found: Figures = host_cost.passes(case, costs, plan, fake.device, mode)
            return found

        yield run


def hold(way: str, found: Figures, recorded: Any) -> None:
    """Raises AssertionError, which says what to do, where a figure is not the one that was recorded."""
    same = all(version(name).split("+")[0] == wanted for name, wanted in recorded["counted with"].items())
    for kind, part in product(found, ("layer", "pass")):
        for field, counted, ceiling in zip(
            ("waits", "copies", "launches"), found[kind][part], recorded["figures"][way][kind][part], strict=True
        ):
            what = f"{way}: {counted} {field} in a {part} of {kind}, the ceiling is {ceiling}"
            ours = same or field != "launches"
            allowed = ceiling if ours else ceiling * OTHER_VERSIONS
            assert counted <= allowed, f"{what}. Take out what was added; HostCost.causes names what was counted."
            lower = f"{what}. Lower it: write {json.dumps({way: found})} into {RECORDED.name} and bench/results/gpu.md."
            assert counted >= ceiling or not ours, lower


@pytest.mark.parametrize("way", WAYS)
def test_a_pass_costs_no_more_than_it_did(way: str, count: Callable[[str], Figures]) -> None:
    hold(way, count(way), recorded())


def test_one_more_wait_in_a_layer_is_too_many(count: Callable[[str], Figures], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a layer that looks at one tensor more, as anybody might write it."""
    combine = expert.combine

    def looks(rows: torch.Tensor, assignment_rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assignment_rows.tolist()
        return combine(rows, assignment_rows, weights)

    monkeypatch.setattr(expert, "combine", looks)
    found, ceilings = count("held, no kernels"), recorded()["figures"]["held, no kernels"]
    for kind, wanted in ceilings.items():
        assert found[kind]["layer"] == (wanted["layer"][0] + 1, *wanted["layer"][1:])
        assert found[kind]["pass"] == (wanted["pass"][0] + LAYERS, *wanted["pass"][1:])
    with pytest.raises(AssertionError, match=r"2 waits in a layer of prompts, the ceiling is 1\. Take out"):
        hold("held, no kernels", found, recorded())


def test_a_figure_below_its_ceiling_asks_for_a_lower_one() -> None:
    ceilings = recorded()
    found = {
        kind: {part: tuple(figures) for part, figures in parts.items()}
        for kind, parts in ceilings["figures"]["all"].items()
    }
    hold("all", found, ceilings)
    waits, *others = found["decode"]["layer"]
    with pytest.raises(AssertionError, match=r"0 waits in a layer of decode, the ceiling is 1\. Lower it"):
        hold("all", {**found, "decode": {**found["decode"], "layer": (waits - 1, *others)}}, ceilings)


def test_other_versions_of_torch_may_launch_a_little_more() -> None:
    ceilings = {**recorded(), "counted with": {"torch": "0.0"}}
    found = {
        kind: {part: list(figures) for part, figures in parts.items()}
        for kind, parts in ceilings["figures"]["held"].items()
    }
    found["decode"]["pass"][2] += 10
    hold("held", found, ceilings)
    found["decode"]["pass"][2] *= 2
    with pytest.raises(AssertionError, match="launches in a pass of decode"):
        hold("held", found, ceilings)


# Work on tensors of the device, and on those of the host that go there: what it costs.
WORK: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], tuple[int, int, int]]] = {
    "a product": (lambda x, host: torch.nn.functional.linear(x, x), (0, 0, 1)),
    "views": (lambda x, host: x.view(-1)[:3].unsqueeze(0).t(), (0, 0, 0)),
    "memory": (lambda x, host: torch.empty_like(x).new_empty(3), (0, 0, 0)),
    "zeros": (lambda x, host: torch.zeros(3, device=x.device), (0, 0, 1)),
    "another dtype": (lambda x, host: x.to(torch.float64), (0, 0, 1)),
    "the same dtype": (lambda x, host: x.to(x.dtype), (0, 0, 0)),
    "a list": (lambda x, host: x.tolist(), (1, 0, 0)),
    "a number": (lambda x, host: x[0, 0].item(), (1, 0, 0)),
    "a condition": (lambda x, host: bool((x > 0).any()), (1, 0, 2)),
    "a copy to the host": (lambda x, host: x.cpu(), (1, 0, 0)),
    "a copy to pageable memory": (lambda x, host: host.copy_(x, non_blocking=True), (1, 0, 0)),
    "a copy of pageable memory": (lambda x, host: host.to(x.device), (1, 0, 0)),
    "asking such a copy not to wait": (lambda x, host: host.to(x.device, non_blocking=True), (1, 0, 0)),
    "a copy of page-locked memory": (lambda x, host: host.pin_memory().to(x.device, non_blocking=True), (0, 1, 0)),
    "waiting for it": (lambda x, host: host.pin_memory().to(x.device), (1, 0, 0)),
    "a new tensor": (lambda x, host: torch.tensor([1, 2], device=x.device), (1, 0, 0)),
    "a list of indices": (lambda x, host: x[[0, 1]], (1, 0, 1)),
    "a mask": (lambda x, host: x[x > 0], (1, 0, 2)),
    "a mask to fill": (lambda x, host: x.masked_fill(x > 0, 1.0), (0, 0, 2)),
    "places": (lambda x, host: x.nonzero(), (1, 0, 1)),
    "counts": (lambda x, host: torch.bincount(x.view(-1).long()), (2, 0, 2)),
    "equality": (lambda x, host: torch.equal(x, x), (1, 0, 1)),
    "distinct numbers": (lambda x, host: torch.unique(x), (1, 0, 1)),
    "work of the host": (lambda x, host: (host + 1).tolist(), (0, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("inference", [True, False])
def test_what_is_a_wait_a_copy_and_a_launch(
    work: str, inference: bool, fakes: ModuleType, host_cost: ModuleType
) -> None:
    done, wanted = WORK[work]
    with host_cost.HostCost(fakes.FakeDevice(), fakes) as costs, torch.inference_mode(inference):
        x = torch.ones(2, 2).to("cuda")
        with costs.counting():
            done(x, torch.ones(2, 2))
    assert costs.whole == wanted, costs.causes


def test_drawing_tokens_of_any_number_of_rows_is_one_launch_and_one_wait(
    fakes: ModuleType, host_cost: ModuleType
) -> None:
    from moedge.runtime.sampling.kernel import draw

    draws = [Draw(SequenceSampling(9, temperature=0.7, top_p=0.9, seed=row), 0, row) for row in range(5)]
    with host_cost.HostCost(fakes.FakeDevice(), fakes) as costs, torch.inference_mode():
        logits = torch.randn(len(draws), 97).to("cuda")
        open_ring(logits.device)
        with costs.counting():
            Sampler(SAMPLER_NBYTES, draw).sample(logits, draws)
    assert costs.whole == (1, 1, 1), costs.causes
    assert sum(costs.whole) == presets.DRAW_LAUNCHES


def test_waiting_for_an_event_is_a_wait(fakes: ModuleType, host_cost: ModuleType) -> None:
    with host_cost.HostCost(fake := fakes.FakeDevice(), fakes) as costs, costs.counting():
        event = fake.cuda.Event()
        event.record(fake.cuda.current_stream())
        event.synchronize()
    assert costs.whole == (1, 0, 0)


@pytest.mark.parametrize("way", ["greedy", "drawn"])
def test_a_sequence_calls_no_more_functions_than_it_did(way: str) -> None:
    ceilings = recorded()["functions that a sequence calls in a pass"]
    found = calls_per_sequence(way == "drawn", LAYERS)
    same = platform.python_version().startswith(f"{ceilings['python']}.")
    assert found == ceilings[way] if same else found <= ceilings[way] * OTHER_VERSIONS


def test_layers_call_none_for_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls_per_sequence(True, 1) == calls_per_sequence(True, 4)
    divide = PassPages.divide

    def looks(self: PassPages, call: AttentionCall, tiled: bool) -> Division:
        assert max(chunk.end for chunk in self.chunks) > 0
        return divide(self, call, tiled)

    monkeypatch.setattr(PassPages, "divide", looks)
    assert calls_per_sequence(True, 4) > calls_per_sequence(True, 1)
