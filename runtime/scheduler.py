"""Which sequences take part in the next pass, with how many tokens. Knows no model and no tensor's contents.

Continuous batching with chunked prompts (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024): decode tokens of all live
sequences first, then prompt tokens, up to `tokens_per_pass`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .batch import Batch, pack
from .kv.cache import KVCache
from .sampling.draw import NO_TOKEN, Sampled
from .sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Most tokens and sequences of a pass."""

    tokens_per_pass: int
    max_sequences: int

    @property
    def live(self) -> int:
        """Every live sequence decodes one token a pass, so there are never more of them than tokens."""
        return min(self.max_sequences, self.tokens_per_pass)


class Scheduler:
    """`waiting` and `running` are in order of age; the oldest sequence is never preempted, so every schedule ends."""

    def __init__(self, limits: PassLimits, cache: KVCache) -> None:
        self.limits = limits
        self.cache = cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def hungry(self) -> bool:
        """Whether more sequences should be added, so that none of the live places stays empty."""
        return len(self.waiting) < self.limits.live

    def add(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that could never be stored: callers check `cache.fits` first."""
        if not self.cache.fits(sequence.max_tokens):
            raise ValueError(f"{sequence.max_tokens} tokens never fit into {self.cache.num_blocks} KV blocks")
        self.waiting.append(sequence)

    def schedule(self) -> Batch:
        """The next pass; has at least one chunk whenever `busy`."""
        chosen: dict[Sequence, int] = {}
        preemptions = self.num_preemptions
        # Decoding sequences have one pending token and come first, each group in order of age.
        for sequence in sorted(self.running, key=lambda running: running.num_pending > 1):
            count = min(sequence.num_pending, self.limits.tokens_per_pass - sum(chosen.values()))
            running = sequence.status is SequenceStatus.RUNNING
            if running and count > 0 and self._make_room(sequence, count, chosen):
                chosen[sequence] = count
        if self.num_preemptions == preemptions:
            self._admit(chosen)
        return pack(list(chosen.items()))

    def commit(self, batch: Batch, samples: Sampled) -> list[Sequence]:
        """Books the pass: tokens stored, tokens sampled; returns the sequences that it finished."""
        for chunk in batch.chunks:
            chunk.sequence.table.num_tokens += chunk.count
        for index, sequence in enumerate(batch.sampling):
            token_id = int(samples.token_ids[index])
            if token_id == NO_TOKEN:
                sequence.finish("error", "the model's logits are not finite numbers")
            else:
                sequence.append(token_id, samples.logprobs.get(index))
        finished = [sequence for sequence in self.running if sequence.finished]
        for sequence in finished:
            self.cache.release(sequence.table)
        self.running = [sequence for sequence in self.running if not sequence.finished]
        return finished

    def _make_room(self, sequence: Sequence, count: int, chosen: dict[Sequence, int]) -> bool:
        """Grows the sequence's blocks, at the cost of the youngest; False where it was the youngest itself."""
        while not self.cache.grow(sequence.table, sequence.table.num_tokens + count):
            youngest = self.running[-1]
            self._preempt(youngest)
            chosen.pop(youngest, None)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Frees a sequence's blocks; it waits at the head of the queue and is computed again from its tokens."""
        self.running.remove(sequence)
        self.cache.release(sequence.table)
        sequence.status = SequenceStatus.WAITING
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _admit(self, chosen: dict[Sequence, int]) -> None:
        budget = self.limits.tokens_per_pass - sum(chosen.values())
        while budget > 0 and self.waiting and len(self.running) < self.limits.live:
            sequence = self.waiting[0]
            # Room for all its tokens and the next one: admitting less would only preempt it soon.
            if self.running and self.cache.free_tokens < sequence.num_tokens + 1:
                return
            count = min(sequence.num_pending, budget)
            if not self.cache.grow(sequence.table, count):
                return
            self.waiting.popleft()
            sequence.status = SequenceStatus.RUNNING
            self.running.append(sequence)
            chosen[sequence] = count
            budget -= count
