"""How many tokens passes may draft at no cost (runtime/engine/lookup.py), by the cost model. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from ..engine.lookup import MOST_DRAFTED
from .candidate import CPU_SAMPLER_NBYTES, SAMPLER_NBYTES, Candidate, largest
from .placement import Plan

# A pass with drafted tokens takes at most this multiple of its time without.
FREE = 1.03
OFF = 'speculate is "off"'


def free_tokens(plan: Plan, candidate: Candidate, seconds: Callable[[int], float]) -> tuple[tuple[int, ...], str]:
    """`Plan.free_tokens`, and why there are none: `seconds` is the time of a pass by its generated tokens.

    While weights arrive, a few more tokens are computed in time that nothing else could use. The logits behind them
    take memory that the plan has for layers, which are over then, or for the sampler of a device.
    """
    if reason := _lack(plan, candidate):
        return (), reason
    spare = 0 if candidate.weights.on_device else SAMPLER_NBYTES - CPU_SAMPLER_NBYTES
    most = min(plan.tokens_per_pass, candidate.live * (1 + MOST_DRAFTED))
    rows = largest(most, lambda rows: candidate.with_rows(rows).fixed - candidate.fixed <= spare)

    def free(sequences: int) -> int:
        limit = FREE * seconds(sequences)
        return max(sequences, largest(rows, lambda tokens: seconds(tokens) <= limit))

    found = tuple(free(1 << power) for power in range(candidate.live.bit_length()))
    if found[-1] > candidate.live:
        return found, ""
    return (), "passes would take longer" if rows > candidate.live else "no memory for the logits"


def _lack(plan: Plan, candidate: Candidate) -> str:
    shape = candidate.weights.shape
    if shape.state_groups:
        return "states of recurrent layers cannot be taken back"
    if any(group.is_index for group in shape.kv_groups):
        return "layers that choose tokens would compute drafted ones like prompts"
    return "" if plan.placement.ring_nbytes else "all weights are held"
