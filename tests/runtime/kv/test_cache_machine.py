"""The cache (`runtime/kv/cache.py`) keeps every sequence's tokens through passes, forks, preemptions and sharing;
broken ones are caught.
"""

from types import ModuleType

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

STEPS = 50
QUIET = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


def run(machine: type, num_examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=num_examples, stateful_step_count=STEPS, phases=[Phase.generate], **QUIET),
    )


@pytest.mark.sample("16")
@pytest.mark.parametrize("examples", [16, 40])
def test_every_sequence_reads_back_its_tokens(examples: int, cache_machine: ModuleType) -> None:
    """tests/matrix/kv_cache.py runs 10,000 steps."""
    happened = cache_machine.CacheMachine.happened
    happened.clear()
    run(cache_machine.CacheMachine, examples)
    wanted = {"park", "preempt", "unpark", "hit", "miss", "fork in a block", "freed behind window"}
    assert all(happened[event] > examples // 8 for event in wanted), happened


@pytest.mark.parametrize(
    "name", ["NoCopyOnWrite", "NoReference", "StillCached", "HashWithoutPast", "ShortWindow", "TailLeftBehind"]
)
def test_a_cache_with_a_rule_left_out_is_caught(name: str, broken_caches: ModuleType) -> None:
    with pytest.raises((AssertionError, ValueError, KeyError, IndexError)):
        run(getattr(broken_caches, name), 200)
