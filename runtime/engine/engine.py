"""The engine: sequences in, finished sequences out, one pass over the weights at a time."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

from ...offload.errors import is_out_of_memory
from ..sampling.draw import Draw, Sampled
from ..sampling.params import TokenLogprob
from ..sampling.sampler import Sampler
from ..settings.errors import MemoryGaveOut
from .batch import Batch, halves
from .mask_thread import MaskThread
from .metrics import Metrics
from .scheduler import ScheduleCounts, Scheduler
from .sequence import Sequence

# Most characters of an allocator's message that are shown.
_MOST_SHOWN = 120


def _refuse(cause: str, tokens: int) -> None:
    raise MemoryGaveOut(f"out of memory in a pass of {tokens:,} tokens ({cause})")


class SplitRetry:
    """Runs a batch with `compute`; where memory runs out, frees what the pass took and runs the same rows in halves.

    Until it is committed, a pass changes nothing but the keys and values of its own tokens, and a retry writes all of
    these again; random numbers depend on seed and position. So the tokens are the same.

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


class Model(Protocol):
    """The interface of a model to the engine."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Runs one pass; returns the logits [R, V] of the batch's `logit_rows`."""
        ...


class Engine:
    """Knows sequences and passes; nothing of rows, files, text or of where weights come from."""

    def __init__(
        self, model: Model, scheduler: Scheduler, sampler: Sampler, free: Callable[[], None] = lambda: None
    ) -> None:
        """`free` gives back the memory that an allocator keeps for later passes."""
        self.model = model
        self.scheduler = scheduler
        self.sampler = sampler
        self.metrics = Metrics()
        self.split_retry = SplitRetry(self._compute, free)
        self._masks = MaskThread()
        # Whether a pass is being computed, or an error has ended one: then this engine cannot be used any more.
        self.in_pass = False

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    def step(self) -> list[Sequence]:
        """One pass over the weights; returns the sequences that it finished."""
        self.in_pass = True
        batch = self.scheduler.schedule()
        samples = self.split_retry.run(batch)
        tables = [sequence.table for sequence in self.scheduler.running]
        self.metrics.count_pass(batch, self.scheduler.cache.usage(tables))
        finished = self.scheduler.commit(batch, samples)
        for sequence in finished:
            self.metrics.count_finished(sequence)
        self.in_pass = False
        return finished

    def _compute(self, batch: Batch) -> Sampled:
        masks = self._masks.begin(batch.sampling)
        logits = self.model.forward(batch)
        return self.sampler.sample(logits, [_draw(sequence) for sequence in batch.sampling], masks.result())

    def start_counting(self) -> None:
        """Resets the counters, so that they count the job only."""
        self.metrics, self.scheduler.counts = Metrics(), ScheduleCounts()

    def run(self) -> Iterator[Sequence]:
        """Passes until nothing is left; yields sequences as they finish."""
        while self.busy:
            yield from self.step()

    def close(self) -> None:
        """Ends the thread that computes masks."""
        self._masks.close()


def _draw(sequence: Sequence) -> Draw:
    position = len(sequence.output_ids)
    return Draw(sequence.params, sequence.sample, position, sequence.history, sequence.forbidden, sequence.forced)
