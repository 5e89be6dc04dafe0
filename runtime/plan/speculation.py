"""How many tokens passes may draft at no cost (runtime/engine/lookup.py), by the cost model. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

from ..engine.lookup import MOST_DRAFTED
from .candidate import CPU_SAMPLER_NBYTES, SAMPLER_NBYTES, Candidate, largest
from .placement import Plan

# A pass with drafted tokens takes at most this multiple of its time without.
FREE = 1.03
# A job with a checkpoint's own head, none of whose tokens came to be accepted, takes at most this multiple of its time
# without: such a head soon stops to be read, and what stays are a layer's keys and values and the weights held for it.
NEARLY = 1.1
# The share of a head's first tokens that is counted on: less than any that was published (arXiv:2412.19437, section
# 5.4.3: 85 to 90 %).
ACCEPTED = 0.5
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


def head_lack(without: Plan, headed: Plan, seconds: tuple[float, float]) -> str:
    """Why a job should not take the checkpoint's own head, which `headed` has; "" where it should. `seconds` are
    predicted for the job without drafts, by either plan."""
    formats = [(plan.quant, plan.dtype, plan.kv, plan.compute) for plan in (without, headed)]
    if formats[0] != formats[1]:
        return f"with it weights and cache would be {headed.quant} and {headed.kv}"
    if not headed.free_tokens:
        return headed.undrafted
    longer, live = seconds[1] / seconds[0], headed.max_sequences
    drafted = min(1.0, headed.free_tokens[-1] / live - 1)
    # What it saves is to be twice what it takes, as for each of its tokens later (engine/predictor.py).
    if longer > min(NEARLY, 1 + ACCEPTED * drafted / 2):
        return f"the job would take {longer - 1:.0%} longer, for {drafted:.2f} free tokens of a sequence and pass"
    return ""


def _lack(plan: Plan, candidate: Candidate) -> str:
    shape = candidate.weights.shape
    if shape.state_groups:
        return "states of recurrent layers cannot be taken back"
    if any(group.is_index for group in shape.kv_groups):
        return "layers that choose tokens would compute drafted ones like prompts"
    return "" if plan.placement.ring_nbytes else "all weights are held"
