"""`bench/gpu/hour.py`: kernels that have fewer multiprocessors than the GPU."""

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu import hour


class Calls(list[str]):
    """Those of torch's green contexts, in their order, and what is done afterwards."""

    def create(self, *, num_sms: int, device_id: int) -> Any:
        self.append(f"create {num_sms} of {device_id}")
        return SimpleNamespace(set_context=lambda: self.append("set"))

    def time(self, cases: Any) -> dict[str, Any]:
        self.append("time")
        return {"of": cases}


def with_contexts(monkeypatch: pytest.MonkeyPatch, contexts: Any) -> Calls:
    calls = Calls()
    monkeypatch.setattr(hour, "_time", calls.time)
    monkeypatch.setitem(sys.modules, "torch.cuda.green_contexts", contexts(calls))
    return calls


def test_the_context_is_there_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = with_contexts(monkeypatch, lambda calls: SimpleNamespace(GreenContext=calls))
    assert hour.time_with(24, "cases") == {"of": "cases"}  # type: ignore[arg-type]
    assert calls == ["create 24 of 0", "set", "time"]
    assert all(count % 8 == 0 for count in hour.MULTIPROCESSORS)


def refuse(**asked: int) -> None:
    raise RuntimeError("CUDA driver error: not supported")


@pytest.mark.parametrize(
    ("contexts", "words"),
    [(None, "green_contexts"), (SimpleNamespace(GreenContext=SimpleNamespace(create=refuse)), "not supported")],
)
def test_without_green_contexts_the_step_says_why(contexts: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = with_contexts(monkeypatch, lambda calls: contexts)
    found = hour.time_with(24, "cases")  # type: ignore[arg-type]
    assert found["skipped"].startswith("no green context of 24 multiprocessors")
    assert words in found["skipped"]
    assert not calls


def test_what_is_timed_goes_to_a_process_of_its_own() -> None:
    for sent in (hour.time_with, hour.partial(hour.timed_attention, (9, 0), 24), hour.timed_experts):
        assert pickle.loads(pickle.dumps(sent))
