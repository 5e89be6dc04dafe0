"""The engine: sequences in, finished sequences out, one pass over the weights at a time.

With what a pass has beside the model: masks of grammars, counters, and retries where memory runs out.
"""

from __future__ import annotations

import gc
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import torch

from ...offload.errors import is_out_of_memory
from ..kv.allocator import Usage
from ..sampling.draw import Draw, Sampled
from ..sampling.grammar import GrammarState
from ..sampling.params import TokenLogprob
from ..sampling.sampler import Sampler, TokenMasks
from ..settings.errors import MemoryGaveOut
from .predictor import Predictor
from .scheduler import ScheduleCounts, Scheduler
from .sequence import Batch, Sequence, halves

if TYPE_CHECKING:
    from llguidance import LLExecutor


class MaskThread:
    """One thread that hands grammars to llguidance, which computes outside of Python's lock, beside the model."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        self._bits = torch.empty(0, dtype=torch.int32)

    def begin(self, sequences: Items[Sequence]) -> Future[TokenMasks] | None:
        """Starts on the masks of those sequences, one per row of the pass, that follow a grammar; None without any.

        Wait for them when the logits are there.
        """
        masked = [
            (row, sequence.grammar, sequence.begin_id)
            for row, sequence in enumerate(sequences)
            if sequence.grammar is not None and sequence.masked
        ]
        if not masked:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        rows, states, allowed = zip(*masked, strict=True)
        return self._thread.submit(self._compute, list(rows), states, allowed)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _compute(self, rows: list[int], states: Items[GrammarState], allowed: Items[int | None]) -> TokenMasks:
        """`allowed` has for each of `rows` the token that may be taken whatever its grammar says."""
        if self._executor is None:
            from llguidance import LLExecutor

            # The model computes at the same time: on a small machine one thread is enough to keep up with it.
            self._executor = LLExecutor(max(1, (os.cpu_count() or 1) // 4))
        bits = self._rows(len(rows), states[0].mask_words)
        work = [(state.matcher, index) for index, state in enumerate(states)]
        self._executor.unsafe_compute_mask_ptr(work, bits.data_ptr(), bits.shape[1] * bits.itemsize, len(rows))
        for index, state in enumerate(states):
            state.check()
            if state.error:
                # Nothing is allowed, so that the sampler has no token to give and the sequence ends with the error.
                bits[index] = 0
        each_bit = bits.view(torch.uint8)
        for index, token_id in enumerate(allowed):
            if token_id is not None and not states[index].error:
                each_bit[index, token_id // 8] |= 1 << token_id % 8
        return TokenMasks(rows, each_bit)

    def _rows(self, num_rows: int, num_words: int) -> torch.Tensor:
        if self._bits.numel() < num_rows * num_words:
            self._bits = torch.empty(num_rows * num_words, dtype=torch.int32)
        return self._bits[: num_rows * num_words].view(num_rows, num_words)


QUANTILES = (0.50, 0.95, 0.99)


def _seconds() -> array[float]:
    """Eight bytes a sequence, where a list takes thirty-two: jobs have hundreds of thousands."""
    return array("d")


@dataclass(slots=True)
class Metrics:
    """Counters of a run, which steer nothing. Sums over passes; `kv` adds up what bytes of the cache were used for.

    `prompt_tokens` were computed, not found in the cache; `resumed_tokens` of prompts and of what was generated were
    computed once more for rows that an earlier run began. `accepted_tokens` of the drafted ones were generated.
    `finished_tokens` is what finished sequences generated, `finished_limit` what they might have.
    """

    passes: int = 0
    pass_tokens: int = 0
    pass_sequences: int = 0
    prompt_tokens: int = 0
    resumed_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    finished_tokens: int = 0
    finished_limit: int = 0
    kv: Usage = field(default_factory=Usage)
    ttft: array[float] = field(default_factory=_seconds)
    tpot: array[float] = field(default_factory=_seconds)
    total: array[float] = field(default_factory=_seconds)

    @classmethod
    def summed(cls, each: Iterable[Metrics], *, sequences: bool) -> Self:
        """The counters of several engines together; with `sequences`, the seconds of every sequence, too."""
        total = cls()
        for metrics in each:
            for one in fields(cls):
                found = getattr(metrics, one.name)
                if isinstance(found, int):
                    setattr(total, one.name, getattr(total, one.name) + found)
                elif one.name == "kv":
                    total.kv.add(found)
                elif sequences:
                    getattr(total, one.name).extend(found)
        return total

    def behind(self, before: Metrics) -> Metrics:
        """These counters with the seconds of the sequences that were reported `before`."""
        return replace(
            self, ttft=before.ttft + self.ttft, tpot=before.tpot + self.tpot, total=before.total + self.total
        )

    def count_pass(self, batch: Batch, kv: Usage) -> None:
        self.passes += 1
        self.pass_tokens += batch.num_tokens
        self.pass_sequences += len(batch.chunks)
        self.generated_tokens += len(batch.sampling)
        self.drafted_tokens += len(batch.drafted)
        for chunk in batch.chunks:
            replayed = chunk.sequence.num_replayed
            known = max(0, min(len(chunk.sequence.prompt_ids) + replayed - chunk.past, chunk.count))
            if replayed:
                self.resumed_tokens += known
            else:
                self.prompt_tokens += known
        self.kv.add(kv)

    def count_finished(self, sequence: Sequence) -> None:
        clock, num_tokens = sequence.clock, len(sequence.output_ids) - sequence.num_replayed
        if num_tokens == 0:
            return
        self.finished_tokens += num_tokens
        self.finished_limit += sequence.params.max_tokens - sequence.num_replayed
        self.ttft.append(clock.first_token - clock.added)
        self.total.append(clock.ended - clock.added)
        if num_tokens > 1:
            self.tpot.append((clock.ended - clock.first_token) / (num_tokens - 1))

    @property
    def waste(self) -> float | None:
        """Share of the bytes of live KV blocks that stored no token, integrated over passes."""
        held = self.kv.live + self.kv.waste
        return self.kv.waste / held if held else None


def quantiles(values: Items[float]) -> tuple[float, ...] | None:
    """The p50, p95 and p99 of `values` by nearest rank; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return tuple(ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in QUANTILES)


# Most characters of an allocator's message that are shown.
_MOST_SHOWN = 120


def _refuse(cause: str, tokens: int) -> None:
    raise MemoryGaveOut(f"out of memory in a pass of {tokens:,} tokens ({cause})")


class SplitRetry:
    """Runs a batch with `compute`; where memory runs out, frees what the pass took and runs the same rows in halves.

    Until it is committed, a pass changes nothing but the keys and values of its own tokens, and a retry writes all of
    these again; random numbers depend on seed and position. So the tokens are the same. A pass that also changes states
    of recurrent layers is not one that `repeats`: its sequences have to start again.

    `fall_back(cause, tokens)` applies a fallback for the next attempt, or raises MemoryGaveOut.
    """

    def __init__(self, compute: Callable[[Batch], Sampled], free: Callable[[], None], repeats: bool = True) -> None:
        self._compute = compute
        self._free = free
        self._repeats = repeats
        self.fall_back: Callable[[str, int], None] = _refuse

    def run(self, batch: Batch) -> Sampled | None:
        """The samples, None of a pass that cannot be repeated. Raises MemoryGaveOut where no fallback is left."""
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
            if not self._repeats:
                self.fall_back(sampled, part.num_tokens)
                return None
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
    scores = tuple(chain.from_iterable(sampled.scores for _, sampled in parts))
    behind = [sampled.behind for _, sampled in parts if sampled.behind is not None]
    token_ids = np.concatenate([sampled.token_ids for _, sampled in parts])
    return Sampled(token_ids, logprobs, scores, torch.cat(behind) if behind else None)


class Model(Protocol):
    """The interface of a model to the engine."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """Runs one pass; returns the logits [R, V] of the batch's `logit_rows`."""
        ...


class Engine:
    """Knows sequences and passes; nothing of rows, files, text or of where weights come from."""

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        sampler: Sampler,
        free: Callable[[], None] = lambda: None,
        predictor: Predictor | None = None,
    ) -> None:
        """`free` gives back the memory that an allocator keeps for later passes; `predictor` drafts behind passes."""
        self.model = model
        self.scheduler = scheduler
        self.sampler = sampler
        self.predictor = predictor
        self.metrics = Metrics()
        self.split_retry = SplitRetry(self._compute, free, scheduler.cache.states is None)
        self._masks = MaskThread()
        # Whether a pass is being computed, or an error has ended one: then this engine cannot be used any more.
        self.in_pass = False

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def add(self, sequence: Sequence) -> None:
        if self.predictor is not None:
            for each in (sequence, *sequence.forks):
                self.predictor.of(each)
        self.scheduler.add(sequence)

    def abort(self, dropped: Callable[[Sequence], bool]) -> None:
        """Drops sequences, between two passes; their blocks are free again."""
        self.scheduler.abort(dropped)

    def step(self) -> list[Sequence]:
        """One pass over the weights; returns the sequences that it finished."""
        self.in_pass = True
        batch = self.scheduler.schedule()
        samples = self.split_retry.run(batch)
        if samples is None:
            self.scheduler.restart(batch)
            self.in_pass = False
            return []
        tables = [sequence.table for sequence in self.scheduler.running]
        self.metrics.count_pass(batch, self.scheduler.cache.usage(tables))
        finished = self.scheduler.commit(batch, samples, partial(self._draw_behind, samples))
        self._predict()
        for sequence in finished:
            self.metrics.count_finished(sequence)
        self.in_pass = False
        return finished

    def _compute(self, batch: Batch) -> Sampled:
        masks = self._masks.begin(batch.sampling)
        logits = self.model.forward(batch)
        sizes = [len(batch.sampling), len(batch.scoring), len(batch.drafted)]
        drawn, scored, behind = torch.split(logits, sizes)
        draws = [_draw(sequence) for sequence in batch.sampling]
        sampled = self.sampler.sample(drawn, draws, None if masks is None else masks.result())
        if batch.scoring or batch.drafted:
            sampled = replace(sampled, scores=self._score(scored, batch), behind=behind)
        if self.predictor is not None:
            self.predictor.keep(batch)
        return sampled

    def _predict(self) -> None:
        """Drafts behind a pass; a head for which memory runs out is not computed any more, and tokens are the same."""
        if self.predictor is None:
            return
        try:
            self.predictor.draft()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.predictor.end(f"out of memory ({cause_of(error)})")
            self.predictor.draft()

    def _draw_behind(self, samples: Sampled, sequences: list[Sequence], rows: list[int]) -> Sampled:
        """A token of each sequence from a row behind drafted tokens that it has accepted meanwhile."""
        assert samples.behind is not None
        masks = self._masks.begin(sequences)
        self.metrics.generated_tokens += len(sequences)
        self.metrics.accepted_tokens += len(sequences)
        logits = samples.behind[torch.tensor(rows, device=samples.behind.device)]
        draws = [_draw(sequence) for sequence in sequences]
        return self.sampler.sample(logits, draws, None if masks is None else masks.result())

    def _score(self, logits: torch.Tensor, batch: Batch) -> tuple[TokenLogprob | None, ...]:
        token_ids = [sequence.prompt_ids[position] for sequence, position in batch.scoring]
        return self.sampler.score(logits, token_ids, [each.params.prompt_logprobs or 0 for each, _ in batch.scoring])

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
