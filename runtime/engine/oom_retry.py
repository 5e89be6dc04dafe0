"""Passes that memory gives out in: what a pass has taken is freed, and the same rows run again in smaller parts.

A pass changes nothing but keys and values of its own tokens until it is committed, and writes all of these anew when it
runs again; random numbers depend on seed and position. So the tokens are the same.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable

import numpy as np

from ...offload.errors import is_out_of_memory
from ..sampling.draw import Sampled
from ..sampling.params import TokenLogprob
from ..settings.errors import MemoryGaveOut
from .batch import Batch, halves

# Of what an allocator says.
_MOST_TOLD = 120


def _refuse(cause: str, tokens: int) -> None:
    raise MemoryGaveOut(f"memory gave out in a pass of {tokens:,} tokens ({cause})")


class SplitRetry:
    """`compute` runs a batch; `fall_back(cause, tokens)` gives something up for it, or raises MemoryGaveOut."""

    def __init__(self, compute: Callable[[Batch], Sampled], free: Callable[[], None]) -> None:
        self._compute = compute
        self._free = free
        self.fall_back: Callable[[str, int], None] = _refuse

    def run(self, batch: Batch) -> Sampled:
        """Raises MemoryGaveOut where nothing is left to give up."""
        waiting, done, failed = deque([batch]), [], None
        while waiting:
            part = waiting.popleft()
            sampled = self._attempt(part)
            if isinstance(sampled, Sampled):
                done.append((part, sampled))
                continue
            # Here, behind the handler: the error's frames held the tensors of the pass.
            gc.collect()
            self._free()
            if part.num_tokens > 1:
                self.fall_back(sampled, part.num_tokens)
                waiting.extendleft(reversed(halves(part)))
                continue
            # What was freed may be enough for a single token.
            if part is failed:
                self.fall_back(sampled, 1)
            failed = part
            waiting.appendleft(part)
        return done[0][1] if len(done) == 1 else _joined(done)

    def _attempt(self, part: Batch) -> Sampled | str:
        """What was sampled, or why there was no memory for it."""
        try:
            return self._compute(part)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return cause_of(error)


def cause_of(error: BaseException) -> str:
    """What an allocator said, in short."""
    lines = str(error).strip().splitlines()
    return lines[0][:_MOST_TOLD] if lines else type(error).__name__


def _joined(parts: list[tuple[Batch, Sampled]]) -> Sampled:
    logprobs: dict[int, TokenLogprob] = {}
    before = 0
    for part, sampled in parts:
        logprobs |= {before + row: told for row, told in sampled.logprobs.items()}
        before += len(part.sampling)
    return Sampled(np.concatenate([sampled.token_ids for _, sampled in parts]), logprobs)
