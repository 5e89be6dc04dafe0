"""The engine: sequences in, finished sequences out, one pass over the weights at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from ..sampling.draw import Draw, Sampled
from ..sampling.sampler import Sampler
from .batch import Batch
from .mask_thread import MaskThread
from .metrics import Metrics
from .oom_retry import SplitRetry
from .scheduler import ScheduleCounts, Scheduler
from .sequence import Sequence


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

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    def step(self) -> list[Sequence]:
        """One pass over the weights; returns the sequences that it finished."""
        batch = self.scheduler.schedule()
        samples = self.split_retry.run(batch)
        tables = [sequence.table for sequence in self.scheduler.running]
        self.metrics.count_pass(batch, self.scheduler.cache.usage(tables))
        finished = self.scheduler.commit(batch, samples)
        for sequence in finished:
            self.metrics.count_finished(sequence)
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
