"""Experts that the CPU computes beside the link (`moe/host_experts.py`) do not show in the tokens; broken ones do."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from moedge.moe.division import ExpertSeconds
from moedge.moe.host_experts import HostExperts
from moedge.moe.streaming_mode import Mode
from moedge.moe.streaming_order import StreamingOrder
from moedge.quant.matmul import rows
from moedge.quant.native import library
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.plan.cpu_experts import host_nbytes
from moedge.runtime.plan.memory_ledger import CPU_EXPERTS
from support.device.expert_modes import restless
from support.stream.simulator import Race

pytestmark = pytest.mark.skipif(not library.available(), reason="the library of CPU kernels is not usable here")
# The CPU computes two thirds of a layer's experts, or all.
SOME, ALL = ExpertSeconds(2.0, 1.0, 0.0, 0.0), ExpertSeconds(1.0, 0.0, 0.0, 0.0)


def run(tiny: Any, fakes: ModuleType, share: float, mode: Mode | None, cpu: ExpertSeconds | None, **how: Any) -> Any:
    with fakes.FakeDevice(seed=int(10 * share)) as fake:
        return tiny.run(divided(tiny, tiny.held(fake.device, share, **how), cpu), fake.device, stream=mode)


def divided(tiny: Any, plan: Any, cpu: ExpertSeconds | None) -> Any:
    """The plan with experts on the CPU."""
    return replace(plan, cpu_experts=cpu, cpu_experts_nbytes=host_nbytes(tiny.source.shape, plan.dtype) if cpu else 0)


def faults(ran: Any, without: Any, wanted: list[list[int]], width: int) -> Iterator[str]:
    """What of a run is not as it should be; `without` is the same one with all missing experts streaming."""
    if not ran.tokens == wanted == without.tokens:
        yield "other tokens than with all experts held"
    by_host, counts = ran.by_host
    if not by_host.experts:
        yield "the CPU computed nothing"
    if counts.hits + counts.fetched - counts.unwanted + by_host.experts != counts.wanted:
        yield "an expert was computed twice, or never"
    if by_host.nbytes_up != by_host.rows * width * 4 or not by_host.nbytes_down:
        yield "other bytes than those of rows went up and down"


@pytest.mark.sample("qwen3_moe-mxfp4-0.5-wanted+forecast-cpu2-False")
@pytest.mark.parametrize(
    ("family", "quant", "share", "mode", "cpu", "on_disk"),
    [
        ("qwen3_moe", "none", 0.0, Mode.WANTED, SOME, False),
        ("qwen3_moe", "int8", 0.5, Mode.ALL, SOME, True),
        # Guesses of this one lay in the ring as a copy that went back over its end (tests/offload/stream).
        ("qwen3_moe", "mxfp4", 0.5, Mode.FORECAST, ALL, False),
        ("qwen3_moe", "int4", 0.5, None, SOME, False),
        ("qwen3_moe", "int4", 0.0, None, ALL, False),
        ("gpt_oss", "none", 0.1, Mode.WANTED, ALL, True),
        ("gpt_oss", "mxfp4", 0.5, None, SOME, False),
        ("mixtral", "nf4", 0.0, None, SOME, True),
        ("mixtral", "nf4", 0.5, Mode.FORECAST, ALL, False),
    ],
)
def test_the_cpu_does_not_show_in_the_tokens(
    family: str,
    quant: str,
    share: float,
    mode: Mode | None,
    cpu: ExpertSeconds,
    on_disk: bool,
    case: Any,
    fakes: ModuleType,
) -> None:
    tiny = case(family, quant)
    with restless():
        without, ran = (run(tiny, fakes, share, mode, each, on_disk=on_disk) for each in (None, cpu))
    assert without.by_host is None
    assert list(faults(ran, without, tiny.run(tiny.plan(None)).tokens, tiny.source.shape.hidden)) == []
    if mode is Mode.WANTED and not share:
        assert ran.to_device < without.to_device


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["int4", "mxfp4"])
def test_tokens_of_bfloat16_stay(quant: str, case: Any, fakes: ModuleType) -> None:
    """Rounded elsewhere than on the device: these tokens are not near another."""
    tiny = case("qwen3_moe")
    tiny = replace(tiny, settings=replace(tiny.settings, dtype="bf16", kv="bf16", quant=quant))
    without, ran = (run(tiny, fakes, 0.5, None, each, on_disk=False) for each in (None, SOME))
    assert ran.by_host[0].experts
    assert ran.tokens == without.tokens


@pytest.mark.slow
def test_preempted_sequences_go_on_as_if_nothing_had_happened(case: Any, fakes: ModuleType) -> None:
    """A cache with room for two of four sequences at their longest, and passes that are divided with the CPU."""
    tiny = case("qwen3_moe")
    tiny = replace(tiny, lengths=(10, 11, 12, 13), new_tokens=9)
    specs = [KVSpec(group, "fp32", 4) for group in tiny.source.shape.kv_groups]
    blocks = tuple(2 * spec.least_blocks(tiny.job.longest) for spec in specs)
    with fakes.FakeDevice() as fake:
        plan = replace(tiny.held(fake.device, 0.5, on_disk=False), max_sequences=4, kv_block=4)
        ample, tight = (replace(plan, kv_blocks=tuple(times * each for each in blocks)) for times in (4, 1))
        wanted, ran = (tiny.run(each, fake.device) for each in (ample, divided(tiny, tight, SOME)))
    assert ran.by_host[0].experts
    assert ran.passes > wanted.passes, "nobody was preempted"
    assert ran.tokens == wanted.tokens


def test_memory_is_what_the_ledger_has_for_it(case: Any, fakes: ModuleType) -> None:
    tiny = case("qwen3_moe")
    with fakes.FakeDevice() as fake:
        plan = divided(tiny, tiny.held(fake.device, 0.5, on_disk=False), SOME)
        with closing(load_engine(tiny.source, plan, None, fake.device)) as loaded:
            arena, host = loaded.ledger.tiers["host"].arenas[CPU_EXPERTS], loaded.streamed.experts.host
            assert arena.planned == arena.actual == host.nbytes > 0
            pinned = [fake.cuda.registered[memory.bytes.data_ptr()] for memory in host._memory]
            assert pinned == [memory.nbytes for memory in host._memory]
        assert not fake.cuda.registered


def _another_row(patch: pytest.MonkeyPatch) -> None:
    compute = rows.multiply_experts

    def rolled(hidden: Any, ids: Any, experts: Any, gate: Any, out: torch.Tensor, *others: Any) -> None:
        compute(hidden, ids, experts, gate, out, *others)
        out.copy_(out.roll(1, 0))

    patch.setattr(rows, "multiply_experts", rolled)


def _uploaded_too_early(patch: pytest.MonkeyPatch) -> None:
    compute, finish = rows.multiply_experts, HostExperts.finish

    def late(*arguments: Any) -> None:
        time.sleep(0.02)
        compute(*arguments)

    def early(self: HostExperts, out: torch.Tensor) -> None:
        if self._begun is None:
            return
        done, places = self._begun
        over: Future[float] = Future()
        over.set_result(0.0)
        self._begun = over, places
        finish(self, out)
        done.result()

    patch.setattr(rows, "multiply_experts", late)
    patch.setattr(HostExperts, "finish", early)


def _read_before_it_is_there(patch: pytest.MonkeyPatch) -> None:
    expect, begin = HostExperts.expect, HostExperts.begin
    states: list[torch.Tensor] = []

    def later(self: HostExperts, layer: int, hidden: torch.Tensor) -> None:
        expect(self, layer, hidden)
        states[:] = [hidden]

    def sent(self: HostExperts, layer: int, *arguments: Any) -> None:
        expect(self, layer, states[0])
        begin(self, layer, *arguments)
        self._begun[0].result()  # type: ignore[index]

    patch.setattr(HostExperts, "expect", later)
    patch.setattr(HostExperts, "begin", sent)


def _states_of_the_first_layer(patch: pytest.MonkeyPatch) -> None:
    expect = HostExperts.expect

    def once(self: HostExperts, layer: int, hidden: torch.Tensor) -> None:
        if self._tokens != len(hidden):
            expect(self, layer, hidden)

    patch.setattr(HostExperts, "expect", once)


def _streamed_as_well(patch: pytest.MonkeyPatch) -> None:
    request = StreamingOrder.request_missing

    def both(self: StreamingOrder, layer: int, wanted: set[int], divide: Any) -> tuple[set[int], set[int]]:
        held, apart = request(self, layer, wanted, divide)
        self._request(self._turn, sorted(apart))
        return held, apart

    patch.setattr(StreamingOrder, "request_missing", both)


def _weighed_twice(patch: pytest.MonkeyPatch) -> None:
    compute = rows.multiply_experts

    def weighed(hidden: Any, ids: Any, experts: Any, gate: Any, out: torch.Tensor, *others: Any) -> None:
        compute(hidden, ids, experts, gate, out, *others)
        out.mul_(0.4)

    patch.setattr(rows, "multiply_experts", weighed)


def _never_put_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostExperts, "finish", lambda self, out: self._drop())


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [
        _another_row, _uploaded_too_early, _read_before_it_is_there, _states_of_the_first_layer, _streamed_as_well,
        _weighed_twice, _never_put_in_place,
    ],
)  # fmt: skip
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], case: Any, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = case("qwen3_moe")
    wanted = tiny.run(tiny.plan(None)).tokens
    without = run(tiny, fakes, 0.0, Mode.WANTED, None, on_disk=False)
    plant(monkeypatch)
    try:
        ran = run(tiny, fakes, 0.0, Mode.WANTED, SOME, on_disk=False)
    except Race:
        return
    assert list(faults(ran, without, wanted, tiny.source.shape.hidden))


@pytest.mark.slow
def test_an_error_of_the_cpu_is_the_run_s(case: Any, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise ArithmeticError("planted")

    monkeypatch.setattr(rows, "multiply_experts", fails)
    with pytest.raises(ArithmeticError, match="planted"):
        run(case("qwen3_moe"), fakes, 0.0, Mode.WANTED, ALL, on_disk=False)
