"""After the rehearsal (`runtime/jobs/lifecycle.py`) passes of any shape find their memory in segments that torch's
allocator has, but for what plans set aside for it.
"""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

AMPERE = (8, 6)
# Snapshots of recurrent states come and go.
STATES = 8 << 10


@pytest.fixture(autouse=True)
def small_segments(segments: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    segments.small_segments(monkeypatch)


def long(tiny: Any) -> Any:
    """Prompts of up to three passes beside short ones."""
    settings = replace(tiny.settings, max_sequences=5, deterministic=False)
    return replace(tiny, settings=settings, lengths=(3, 147, 17, 40, 9, 5), new_tokens=9)


def check(ran: Any, segments: ModuleType, more: int = 0) -> None:
    """Segments are taken at most where sizes of tensors fall to the other kind, or fall apart otherwise."""
    begun, going, decoding = (max(kind[index] for kind in ran.kinds) for index in range(3))
    assert min(begun, going, decoding) > 0, "the passes were of one kind"
    assert ran.grown <= segments.SLACK + more
    assert ran.segments <= 4 or more
    assert ran.left <= STATES + more


@pytest.mark.sample("1.0-llama")
@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3_moe", "mixtral", "gpt_oss", "gemma3_text", "qwen3_next", "deepseek_v3", "granitemoehybrid"],
)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_passes_take_no_more_than_was_rehearsed(
    share: float, family: str, case: Any, fakes: ModuleType, segments: ModuleType
) -> None:
    """Weights that are held, in part, and that stream."""
    tiny, fake = long(case(family)), fakes.FakeDevice(3)
    with fake:
        ran = segments.run(tiny, fake, tiny.plan(fake.device, share))
    check(ran, segments)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["fp32", "int8"])
def test_nor_do_sequences_in_host_memory(
    kv: str, case: Any, fakes: ModuleType, segments: ModuleType, host_kv: ModuleType
) -> None:
    tiny = long(case("qwen3_moe"))
    tiny, fake = replace(tiny, settings=replace(tiny.settings, kv=kv)), fakes.FakeDevice(4)
    plan = replace(host_kv.hosted(tiny, tiny.plan(fake.device, 0.0), 2, 2, 2), max_sequences=5)
    with fake:
        ran = segments.run(tiny, fake, plan)
    check(ran, segments)


@pytest.mark.slow
def test_graphs_take_what_the_plan_sets_aside_for_them(case: Any, fakes: ModuleType, segments: ModuleType) -> None:
    """They are recorded in passes, by Triton's kernels in their interpreter."""
    tiny = long(case("qwen3_moe", "nf4"))
    tiny = replace(
        tiny, lengths=(3, 14, 7), new_tokens=5, settings=replace(tiny.settings, kv="int8", tokens_per_pass=8)
    )
    fake = fakes.FakeDevice(5, capability=AMPERE)
    plan = tiny.plan(fake.device, 1.0)
    assert plan.graphs_nbytes > 0
    with fake:
        ran = segments.run(tiny, fake, plan, passes=14)
    check(ran, segments, plan.graphs_nbytes)


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (2, 1, 5)])
@pytest.mark.parametrize("blocks", [2, 16])
def test_short_rows_are_rehearsed_too(
    blocks: int, lengths: tuple[int, ...], case: Any, fakes: ModuleType, segments: ModuleType
) -> None:
    """In a cache that has hardly room for one of them, too."""
    tiny, fake = replace(case("llama"), lengths=lengths, new_tokens=1), fakes.FakeDevice(3)
    plan = tiny.plan(fake.device, 1.0)
    plan = replace(plan, kv_block=4, kv_blocks=(blocks,))
    with fake:
        ran = segments.run(tiny, fake, plan, passes=4)
    assert ran.passes == 4


def bugs() -> list[str]:
    from support.device.segments import BUGS

    return list(BUGS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "share", "bug"),
    [
        *(("llama", 1.0, bug) for bug in bugs()),
        # Beside experts that stream, attention's scratch is small.
        *(("qwen3_moe", 0.0, bug) for bug in bugs() if bug != "scratch that grows"),
    ],
)
def test_a_bug_by_which_passes_take_more_is_found(
    family: str,
    share: float,
    bug: str,
    case: Any,
    fakes: ModuleType,
    segments: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny, fake = long(case(family)), fakes.FakeDevice(3)
    segments.BUGS[bug](monkeypatch)
    with fake:
        ran = segments.run(tiny, fake, tiny.plan(fake.device, share))
    with pytest.raises(AssertionError):
        check(ran, segments)
