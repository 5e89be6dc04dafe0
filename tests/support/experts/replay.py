"""Replays what layers wanted, against a policy with so many slots: the hit counts that tables and tests compare."""

from collections.abc import Iterable, Sequence

from moedge.moe.policy import ExpertKey, HoldPolicy

Trace = Sequence[Sequence[int]]  # turns: the experts that a layer wanted, layer after layer, pass after pass


def replay(trace: Trace, num_layers: int, policy: HoldPolicy, held: Iterable[ExpertKey]) -> int:
    """Hits of the whole trace; every miss arrives and is offered a slot, as ExpertSupply does it."""
    slots, hits = set(held), 0
    for turn, wanted in enumerate(trace):
        layer = turn % num_layers
        if layer == 0:
            policy.begin_pass()
        policy.saw(layer, wanted)
        keys = [ExpertKey(layer, expert) for expert in wanted]
        missing = [key for key in keys if key not in slots]
        hits += len(keys) - len(missing)
        for key in missing:
            if (leaving := policy.victim(key, lambda _: True)) is not None:
                slots.remove(leaving)
                slots.add(key)
    return hits


def belady(trace: Trace, num_layers: int, num_slots: int) -> int:
    """Hits of the best policy there can be, which knows what comes; it may let what arrives pass by.

    L. A. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 5 (1966).
    """
    coming: dict[ExpertKey, list[int]] = {}
    for turn, wanted in enumerate(trace):
        for expert in wanted:
            coming.setdefault(ExpertKey(turn % num_layers, expert), []).append(turn)
    for turns in coming.values():
        turns.reverse()
    slots: set[ExpertKey] = set()
    hits, never = 0, len(trace)

    def next_use(key: ExpertKey) -> int:
        return coming[key][-1] if coming[key] else never

    for turn, wanted in enumerate(trace):
        keys = [ExpertKey(turn % num_layers, expert) for expert in wanted]
        hits += sum(key in slots for key in keys)
        for key in keys:
            coming[key].pop()
        for key in keys:
            if key in slots or next_use(key) == never:
                continue
            if len(slots) >= num_slots:
                farthest = max(slots, key=next_use)
                if next_use(farthest) <= next_use(key):
                    continue
                slots.remove(farthest)
            slots.add(key)
    return hits
