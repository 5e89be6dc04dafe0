"""Does the KV cache keep every sequence's tokens, and would we notice if it did not?

Runs the state machine of support/kv: the real cache for 10,000 steps of random passes, forks, preemptions and sharing,
then every broken variant until it is caught, 10,000 steps at most.
"""

from collections.abc import Iterator
from functools import partial

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from matrix.state import Part
from support.kv import broken_caches, cache_machine

STEPS, QUICK_STEPS = 10_000, 500
STEPS_PER_EXAMPLE = 100
# Caught within a few examples.
QUICK_BROKEN = 2


def parts(quick: bool) -> Iterator[Part]:
    yield Part("the cache", partial(cache_faults, QUICK_STEPS if quick else STEPS))
    for broken in broken_caches.BROKEN[:QUICK_BROKEN] if quick else broken_caches.BROKEN:
        yield Part(f"{broken.__name__}, {broken.__doc__}", partial(broken_faults, broken, STEPS))


def cache_faults(num_steps: int) -> list[str]:
    """What the machine found wrong with the real cache."""
    wrong = failure(cache_machine.CacheMachine, num_steps)
    print("  " + ", ".join(f"{count} x {event}" for event, count in cache_machine.CacheMachine.happened.most_common()))
    return [wrong] if wrong else []


def broken_faults(broken: type, num_steps: int) -> list[str]:
    return [] if failure(broken, num_steps) else [f"not caught in {num_steps} steps"]


def failure(machine: type, num_steps: int) -> str | None:
    """What the machine found wrong in `num_steps` steps."""
    quiet = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=max(1, num_steps // STEPS_PER_EXAMPLE),
                stateful_step_count=STEPS_PER_EXAMPLE,
                phases=[Phase.generate],
                **quiet,
            ),
        )
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'an invariant'}"
    return None
