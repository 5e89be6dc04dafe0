"""Replays what layers wanted against a policy: the hit counts that tables and tests compare."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from moedge.offload.stream.stream import ShardKey


class HoldPolicy(Protocol):
    """What moedge.moe.expert_cache.Popular is."""

    def begin_pass(self) -> None: ...

    def observe(self, layer: int, wanted: Sequence[int]) -> None: ...

    def victim(self, entering: ShardKey, may_leave: Callable[[ShardKey], bool]) -> ShardKey | None: ...


Trace = Sequence[Sequence[int]]  # turns: the experts that a layer wanted, layer after layer, pass after pass


def replay(trace: Trace, num_layers: int, policy: HoldPolicy, held: Iterable[ShardKey]) -> int:
    """Hits of the whole trace; every miss arrives and is offered a slot, as in StreamingExpertCache."""
    slots, hits = set(held), 0
    for turn, wanted in enumerate(trace):
        layer = turn % num_layers
        if layer == 0:
            policy.begin_pass()
        policy.observe(layer, wanted)
        keys = [ShardKey(layer, expert) for expert in wanted]
        missing = [key for key in keys if key not in slots]
        hits += len(keys) - len(missing)
        for key in missing:
            if (leaving := policy.victim(key, lambda _: True)) is not None:
                slots.remove(leaving)
                slots.add(key)
    return hits


def belady(trace: Trace, num_layers: int, held: Iterable[ShardKey]) -> int:
    """Hits of the best policy there can be, which knows what comes and may let what arrives pass by.

    L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5 (1966).
    """
    uses: dict[ShardKey, list[int]] = {}
    for turn, wanted in enumerate(trace):
        for expert in wanted:
            uses.setdefault(ShardKey(turn % num_layers, expert), []).append(turn)
    for turns in uses.values():
        turns.reverse()
    slots = set(held)
    hits, never = 0, len(trace)

    def next_use(key: ShardKey) -> int:
        return uses[key][-1] if uses.get(key) else never

    for turn, wanted in enumerate(trace):
        keys = [ShardKey(turn % num_layers, expert) for expert in wanted]
        hits += sum(key in slots for key in keys)
        for key in keys:
            uses[key].pop()
        for key in keys:
            if key in slots or next_use(key) == never:
                continue
            farthest = max(slots, key=next_use, default=key)
            if next_use(farthest) > next_use(key):
                slots.remove(farthest)
                slots.add(key)
    return hits
