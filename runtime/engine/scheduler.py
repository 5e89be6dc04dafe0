"""Which sequences take part in the next pass, with how many tokens. Knows no model and no tensor's contents.

Continuous batching with chunked prompts (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024): decode tokens of all live
sequences first, then prompt tokens, up to `tokens_per_pass`. A policy of whoever adds urgent sequences may give these
their part of a pass before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ..kv.cache import KVCache
from ..sampling.draw import NO_TOKEN, Sampled
from .sequence import Batch, Sequence, SequenceStatus, cut_count, pack

# Sequences and, of the logits behind drafted tokens, the row of each, to a token of each.
DrawBehind: TypeAlias = Callable[[list[Sequence], list[int]], Sampled]


@dataclass(frozen=True, slots=True)
class PassLimits:
    """Most tokens and sequences of a pass; a prompt is cut at multiples of `cut` only.

    Where 2**i sequences run or more, a pass of up to `free_tokens[i]` generated and drafted tokens costs what it costs
    for theirs alone, so that tokens are drafted; beside prompts, too. Nothing is where there are none.
    """

    tokens_per_pass: int
    max_sequences: int
    cut: int = 1
    free_tokens: tuple[int, ...] = ()

    @property
    def live(self) -> int:
        """Every live sequence decodes one token a pass, so there are never more of them than tokens."""
        return min(self.max_sequences, self.tokens_per_pass)


@dataclass(slots=True)
class ScheduleCounts:
    """How often memory ran out in the cache, and how much the prefix cache saved."""

    preemptions: int = 0
    # Of those, how many left their blocks in host memory.
    parked: int = 0
    # Tokens that were stored, lost to a preemption, and computed again.
    recomputed_tokens: int = 0
    # Prompt tokens that were found in the cache, or shared by the samples of one prompt, and not computed.
    prefix_hit_tokens: int = 0


class Scheduler:
    """`waiting` and `running` are in order of age; the oldest sequence is never preempted, so every schedule ends.

    Urgent sequences are the first of `running` and wait in a queue of their own, `urgent`. What they get of a pass is
    up to the `policy` alone, which is called at the beginning of each: it continues and starts them.
    """

    def __init__(self, limits: PassLimits, cache: KVCache) -> None:
        self.limits = limits
        self.cache = cache
        self.waiting: deque[Sequence] = deque()
        self.urgent: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.policy: Callable[[Scheduler, Draft], None] | None = None
        self.counts = ScheduleCounts()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.urgent)

    @property
    def has_capacity(self) -> bool:
        """Whether the scheduler should get more sequences to fill its passes."""
        return len(self.waiting) < self.limits.live

    def add(self, sequence: Sequence) -> None:
        """Raises ValueError for a sequence that could never be stored: callers check `cache.fits` first."""
        longest = max(each.max_tokens for each in (sequence, *sequence.forks))
        if not self.cache.fits(longest):
            raise ValueError(f"{longest} tokens never fit into the {self.cache.nbytes:,} bytes of the KV cache")
        for each in sequence.forks:
            each.urgent = sequence.urgent
        self._queue_of(sequence).append(sequence)
        self.cache.expect(sequence.table, sequence.tokens, min(len(sequence.prompt_ids), sequence.num_shareable))

    def schedule(self) -> Batch:
        """The next pass; has at least one chunk whenever `busy`."""
        draft = Draft(self.limits.tokens_per_pass, max(0, self.limits.live - self.num_claimed))
        preemptions = self.counts.preemptions
        if self.policy is not None:
            self.policy(self, draft)
        self.proceed([sequence for sequence in self.running if not sequence.urgent], draft)
        # Blocks are published only now: a chosen sequence could still be preempted before, and its blocks never filled.
        for sequence in draft.chosen:
            self._publish(sequence)
        if self.counts.preemptions == preemptions:
            self._admit(draft)
        self._limit_forks(draft)
        if self.limits.free_tokens:
            self._speculate(draft)
        return pack(sorted(draft.chosen.items(), key=lambda chosen: chosen[0].table.cohort))

    def commit(self, batch: Batch, samples: Sampled, draw: DrawBehind | None = None) -> list[Sequence]:
        """Books the pass: tokens stored, tokens sampled; returns the sequences that it finished.

        `draw` samples a token for each of some sequences from rows behind drafted tokens, as a pass would have.
        """
        for chunk in batch.chunks:
            self.cache.store(chunk.sequence.table, chunk.count - chunk.drafted)
        for chunk in batch.chunks:
            if chunk.forks:
                self._fork(chunk.sequence)
        for (sequence, position), score in zip(batch.scoring, samples.scores, strict=True):
            if sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs.add(position, score)
        _append(batch.sampling, samples)
        if batch.drafted and draw is not None:
            self._verify(batch, draw)
        finished = [sequence for sequence in self.running if sequence.finished]
        for sequence in finished:
            self.cache.release(sequence.table)
        self.running = [sequence for sequence in self.running if not sequence.finished]
        return finished

    def _speculate(self, draft: Draft) -> None:
        """Lets sequences whose last token is in the pass draft more, as many as cost nothing, the most accepted first.

        Takes free blocks only, and only for this pass.
        """
        free, chosen = self.limits.free_tokens, draft.chosen
        least = free[min(len(free), len(chosen).bit_length()) - 1]
        rows = sum(
            each.num_slots + len(each.unscored(at := each.table.num_tokens, at + chosen[each])) for each in chosen
        )
        left = min(draft.tokens_left, least - rows)
        found = [each for each, count in chosen.items() if count == each.num_pending and not each.forks]
        for sequence in sorted(found, key=lambda each: each.lookup.depth, reverse=True):
            lookup, stored = sequence.lookup, sequence.table.num_tokens + chosen[sequence]
            room = sequence.table.num_tokens + self.cache.headroom(sequence.table) - stored
            most = min(left, lookup.depth, room, sequence.max_tokens - sequence.num_tokens - 1)
            if most > 0 and not lookup.skips():
                lookup.extend(sequence.tokens(len(lookup), sequence.num_tokens))
                sequence.drafted = lookup.draft(most)
                self.cache.grow(sequence.table, stored + len(sequence.drafted))
                chosen[sequence] += len(sequence.drafted)
                left -= len(sequence.drafted)

    def _verify(self, batch: Batch, draw: DrawBehind) -> None:
        """Goes on with the sequences whose drafted token is the one that was drawn, until none is left."""
        going = {sequence: row for row, sequence in reversed([*enumerate(batch.drafted)])}
        accepted = dict.fromkeys(going, 0)
        while going := {each: row for each, row in going.items() if _follows(each, accepted[each])}:
            for sequence in going:
                self.cache.store(sequence.table, 1)
                accepted[sequence] += 1
            _append(list(going), draw(list(going), [row + accepted[each] - 1 for each, row in going.items()]))
        for sequence, count in accepted.items():
            sequence.lookup.judge(len(sequence.drafted), count)
            sequence.drafted = []
            self.cache.shrink(sequence.table)

    def abort(self, dropped: Callable[[Sequence], bool] = lambda sequence: True) -> None:
        """Drops sequences, between two passes; their blocks are free again."""
        for sequence in filter(dropped, (*self.running, *self.waiting, *self.urgent)):
            self.cache.release(sequence.table)
        self.running = [sequence for sequence in self.running if not dropped(sequence)]
        self.waiting = deque(sequence for sequence in self.waiting if not dropped(sequence))
        self.urgent = deque(sequence for sequence in self.urgent if not dropped(sequence))

    def forget_parked(self) -> None:
        """Sequences that wait in host memory are computed again, and none is parked any more."""
        for sequence in (*self.waiting, *self.urgent):
            self.cache.drop_parked(sequence.table)
        self.cache.host = None

    def _queue_of(self, sequence: Sequence) -> deque[Sequence]:
        return self.urgent if sequence.urgent else self.waiting

    def proceed(self, sequences: Iterable[Sequence], draft: Draft) -> None:
        """Gives running sequences their tokens of the pass, as long as there are any.

        Decoding sequences have one pending token and come first, each group in the order of `sequences`.
        """
        for sequence in sorted(sequences, key=lambda running: running.num_pending > 1):
            if sequence.status is SequenceStatus.RUNNING and draft.tokens_left:
                self._continue(sequence, draft)

    @property
    def num_claimed(self) -> int:
        """Slots of a pass that running sequences and their forks have."""
        return sum(sequence.num_slots for sequence in self.running)

    def opens(self, sequence: Sequence, claim: int, claimed: int, draft: Draft) -> bool:
        """Gives a sequence that waits its stored blocks, if it can start beside those that run.

        `claim`: the slots of the pass that it is to have; `claimed`: those of the running ones.
        """
        # Before blocks are taken, with nothing stored: what is found there is a multiple of whole blocks.
        if claim > draft.spare_rows or not self.count_tokens(sequence, draft.tokens_left):
            return False
        return self.cache.open(
            sequence.table, sequence.tokens, sequence.num_tokens, spare=claimed, shareable=sequence.num_shareable
        )

    def _continue(self, sequence: Sequence, draft: Draft) -> None:
        """Gives a running sequence its tokens of the pass; preempts the youngest sequences if no block is free."""
        if sequence.num_pending == 1 and self.cache.grow_within_block(sequence.table):
            draft.choose(sequence, 1)
            return
        if not (wanted := self.count_tokens(sequence, draft.tokens_left)):
            return
        least = min(wanted, self.limits.cut)
        while (free_tokens := self.cache.headroom(sequence.table)) < least:
            youngest = next(each for each in reversed(self.running) if each.table.cohort == sequence.table.cohort)
            if self.cache.move(youngest.table):
                continue
            self.preempt(youngest)
            draft.drop(youngest)
            if youngest is sequence:
                return
        count = self.count_tokens(sequence, draft.scored(sequence, min(wanted, free_tokens), self.limits.cut))
        self.cache.grow(sequence.table, sequence.table.num_tokens + count)
        draft.choose(sequence, count)

    def count_tokens(self, sequence: Sequence, most: int) -> int:
        """The tokens of a sequence's next chunk, at most `most`; 0 where its prompt cannot be cut so early."""
        return cut_count(sequence, sequence.table.num_tokens, min(sequence.num_pending, most), self.limits.cut)

    def restart(self, batch: Batch) -> None:
        """Takes back a pass that failed after it had changed states: its sequences are computed again."""
        chosen = {chunk.sequence for chunk in batch.chunks}
        for sequence in chosen:
            self.cache.retract(sequence.table)
        for sequence in reversed([each for each in self.running if each in chosen]):
            self.preempt(sequence)

    def _publish(self, sequence: Sequence) -> None:
        self.cache.publish(sequence.table, sequence.tokens, len(sequence.prompt_ids))

    def preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks; it waits at the head of the queue, parked or to be computed again."""
        self.running.remove(sequence)
        sequence.num_lost = sequence.table.num_tokens
        self.counts.parked += self.cache.set_aside(sequence.table)
        sequence.status = SequenceStatus.WAITING
        self._queue_of(sequence).appendleft(sequence)
        self.counts.preemptions += 1

    def _admit(self, draft: Draft) -> None:
        """Starts sequences in order of age while the pass has tokens and the cache has blocks for the next one.

        A block for each running sequence is left to grow into: without it, admitting one soon preempts another.
        """
        claimed = self.num_claimed
        while draft.tokens_left and self.waiting:
            claim = min(self.waiting[0].num_slots, self.limits.live)
            if not self.opens(self.waiting[0], claim, claimed, draft):
                return
            claimed += claim
            self.start(self.waiting.popleft(), claim, draft)

    def start(self, sequence: Sequence, claim: int, draft: Draft) -> None:
        """Runs a sequence that was opened, in `claim` slots of the pass."""
        table = sequence.table
        draft.spare_rows -= claim
        self._count_opened(sequence)
        most = min(sequence.num_pending, draft.tokens_left, self.cache.headroom(table))
        count = self.count_tokens(sequence, draft.scored(sequence, most, self.limits.cut))
        self.cache.grow(table, table.num_tokens + count)
        self._publish(sequence)
        sequence.status = SequenceStatus.RUNNING
        self._run([sequence])
        draft.choose(sequence, count)

    def _run(self, sequences: list[Sequence]) -> None:
        """Urgent ones before all others, each kind in order of age."""
        first = bool(sequences) and sequences[0].urgent
        index = bisect_left(self.running, True, key=lambda each: not each.urgent) if first else len(self.running)
        self.running[index:index] = sequences

    def _count_opened(self, sequence: Sequence) -> None:
        if sequence.num_lost:
            self.counts.recomputed_tokens += max(0, sequence.num_lost - sequence.table.num_tokens)
            sequence.num_lost = 0
        elif not sequence.output_ids:
            sequence.num_cached = sequence.table.num_tokens
            self.counts.prefix_hit_tokens += sequence.num_cached

    def _limit_forks(self, draft: Draft) -> None:
        """Queues the samples that a pass cannot hold: they find most of their prompt in the cache later."""
        seats = self.limits.live - len(self.running)
        for sequence, count in draft.chosen.items():
            if sequence.forks and count == sequence.num_pending:
                waiting = sequence.forks[max(seats, 0) :]
                sequence.forks = sequence.forks[: max(seats, 0)]
                seats -= len(sequence.forks)
                self._queue_of(sequence).extendleft(reversed(waiting))

    def _fork(self, sequence: Sequence) -> None:
        """Splits off the samples of one prompt: each takes its first token from the same logits."""
        for fork in sequence.forks:
            fork.table = self.cache.fork(sequence.table)
            fork.status = SequenceStatus.RUNNING
            self.counts.prefix_hit_tokens += len(fork.prompt_ids)
        self._run(sequence.forks)
        sequence.forks = []


def _append(sequences: Iterable[Sequence], samples: Sampled) -> None:
    for index, (sequence, token_id) in enumerate(zip(sequences, samples.token_ids.tolist(), strict=True)):
        if token_id == NO_TOKEN or sequence.broken:
            sequence.fail()
        else:
            sequence.append(token_id, samples.logprobs.get(index))


def _follows(sequence: Sequence, accepted: int) -> bool:
    """Whether the last token of a sequence is the drafted one behind those that were `accepted`."""
    drafted = sequence.drafted
    return not sequence.finished and accepted < len(drafted) and sequence.output_ids[-1] == drafted[accepted]


class Draft:
    """The pass under construction: the tokens of each chosen sequence, and how many tokens are left.

    Every sequence, and every fork, may get one row of logits; `spare_rows` is what plans have memory for beyond that.
    """

    def __init__(self, tokens_per_pass: int, spare_rows: int) -> None:
        self.tokens_left = tokens_per_pass
        self.spare_rows = spare_rows
        self.chosen: dict[Sequence, int] = {}

    def scored(self, sequence: Sequence, count: int, cut: int) -> int:
        """As many of a sequence's next `count` tokens as have rows of logits where its prompt is scored.

        At least `cut`, if there are as many: with fewer, a prompt that is cut at multiples of it would never go on.
        """
        past = sequence.table.num_tokens
        scoring = sequence.unscored(past, past + count)
        if not scoring:
            return count
        # The last of all tokens takes the sequence's own row; without it, the first that is scored does.
        beyond = len(scoring) - (past + count < sequence.num_tokens)
        if beyond <= self.spare_rows:
            self.spare_rows -= beyond
            return count
        count, self.spare_rows = max(scoring.start - past + 1 + self.spare_rows, min(count, cut)), 0
        return count

    def choose(self, sequence: Sequence, count: int) -> None:
        self.chosen[sequence] = count
        self.tokens_left -= count

    def drop(self, sequence: Sequence) -> None:
        self.tokens_left += self.chosen.pop(sequence, 0)
