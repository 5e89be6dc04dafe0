"""Does the KV cache keep every sequence's tokens, and would we notice if it did not?

    python bench/kv_cache.py [--steps 10000] [--limit 10000]

Runs the state machine beside the cache's tests: the real cache for --steps steps of random passes, forks, preemptions
and sharing, then every broken variant until it is caught, --limit steps at most. Exits 1 when the real cache fails or
a broken one is not caught.
"""

import argparse
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime" / "kv"))

import broken_caches
import cache_machine

STEPS = 100


def failure(machine: type, num_steps: int) -> str | None:
    """What the machine found wrong in `num_steps` steps."""
    quiet = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=max(1, num_steps // STEPS), stateful_step_count=STEPS, phases=[Phase.generate], **quiet
            ),
        )
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'an invariant'}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--limit", type=int, default=10_000)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    wrong = failure(cache_machine.CacheMachine, arguments.steps)
    print(f"the cache: {wrong or 'nothing wrong'} in {arguments.steps} steps, {time.perf_counter() - begun:.0f} s")
    happened = cache_machine.CacheMachine.happened
    print("  " + ", ".join(f"{count} x {event}" for event, count in happened.most_common()))
    missed = 0
    for broken in broken_caches.BROKEN:
        found = failure(broken, arguments.limit)
        missed += found is None
        print(f"{broken.__name__:16} {broken.__doc__}: {found or 'NOT CAUGHT'}")
    sys.exit(wrong is not None or missed > 0)


if __name__ == "__main__":
    main()
