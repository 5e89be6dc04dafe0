"""Retries a pass that runs out of memory: frees what the pass took, and runs the same rows again in halves.

Until it is committed, a pass changes nothing but the keys and values of its own tokens, and a retry writes all of these
again; random numbers depend on seed and position. So the tokens are the same.
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

# Most characters of an allocator's message that are shown.
_MOST_SHOWN = 120


def _refuse(cause: str, tokens: int) -> None:
    raise MemoryGaveOut(f"out of memory in a pass of {tokens:,} tokens ({cause})")


class SplitRetry:
    """Runs a batch with `compute`, in halves where memory runs out.

    `fall_back(cause, tokens)` applies a fallback for the next attempt, or raises MemoryGaveOut.
    """

    def __init__(self, compute: Callable[[Batch], Sampled], free: Callable[[], None]) -> None:
        self._compute = compute
        self._free = free
        self.fall_back: Callable[[str, int], None] = _refuse

    def run(self, batch: Batch) -> Sampled:
        """Raises MemoryGaveOut where no fallback is left."""
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
        """The samples, or the message of the allocator."""
        try:
            return self._compute(part)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return cause_of(error)


def cause_of(error: BaseException) -> str:
    """The first line of an allocator's message."""
    lines = str(error).strip().splitlines()
    return lines[0][:_MOST_SHOWN] if lines else type(error).__name__


def _joined(parts: list[tuple[Batch, Sampled]]) -> Sampled:
    logprobs: dict[int, TokenLogprob] = {}
    before = 0
    for part, sampled in parts:
        logprobs |= {before + row: logprob for row, logprob in sampled.logprobs.items()}
        before += len(part.sampling)
    return Sampled(np.concatenate([sampled.token_ids for _, sampled in parts]), logprobs)
