"""Drafts of a model's own MTP head (runtime/model/mtp.py), for all sequences of a pass at once.

They are verified as those of prompt lookup are (scheduler.py): the head is another source of drafts, and nothing else.
It sees every token of a sequence behind the pass that stored it. Blocks of a shared prefix have its keys and values,
too; those of a block's last token are of whoever stored it, with the token that followed there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from .lookup import Lookup
from .scheduler import Scheduler
from .sequence import Batch, Sequence, SequenceStatus, TokenChunk

# GLM-4.5's own recommendation is three (its model card).
MOST_PREDICTED = 3
# Drafted tokens before their acceptance says anything; behind twice as many, earlier ones count half.
_TRIED = 128


class Head(Protocol):
    """`hidden` [T, D] are the states of the model's last pass that it reads."""

    hidden: torch.Tensor

    def leave(self) -> None:
        """Between two passes: it is not called any more, and nothing is read for it."""
        ...

    def forward(self, batch: Batch, hidden: torch.Tensor, again: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [R] and states [R, D] of the batch's `logit_rows`; `again`: another call comes before a pass."""
        ...


class HeadDrafts(Lookup):
    """The tokens that a head expects behind those of one sequence."""

    __slots__ = ("_predictor", "ids")

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self._predictor = predictor
        self.ids: list[int] = []
        self.depth = MOST_PREDICTED

    def extend(self, token_ids: Iterable[int]) -> None:
        """It looks nothing up."""

    def skips(self) -> bool:
        return not self.ids

    def draft(self, most: int) -> list[int]:
        return self.ids[:most]

    def judge(self, drafted: int, accepted: int) -> None:
        self._predictor.judge(drafted, accepted)


class _Pass(NamedTuple):
    batch: Batch
    hidden: torch.Tensor


class Predictor:
    """Lets `head` draft up to `depth` tokens behind each pass, as far as passes have room for them: each that comes to
    be accepted often enough for the time that it takes. Once `ended` has a reason, sequences look up their drafts."""

    def __init__(self, head: Head, scheduler: Scheduler, layers: int) -> None:
        """A pass computes `layers`, and the head is as large as one of them."""
        self.depth = 1
        self.ended = ""
        self._head = head
        self._scheduler = scheduler
        # Twice its share of a pass, or half a token: with two layers that is all that it takes.
        self._least = min(0.5, 2 / layers)
        self._tried = self._right = 0
        self._passed: list[_Pass] = []
        self._left = False

    def of(self, sequence: Sequence) -> None:
        """What drafts for a sequence."""
        sequence.lookup = Lookup() if self.ended else HeadDrafts(self)

    def keep(self, batch: Batch) -> None:
        """Takes the states of a pass, or of a part of it, that was computed."""
        if self.depth:
            self._passed.append(_Pass(batch, self._head.hidden[: batch.num_tokens]))

    def judge(self, drafted: int, accepted: int) -> None:
        """Counts a draft: tokens that were accepted, and the first that was not."""
        self._tried += accepted + (accepted < drafted)
        self._right += accepted
        if self._tried < _TRIED or not self.depth:
            return
        share = self._right / self._tried
        self.depth = sum(share**depth >= self._least for depth in range(1, MOST_PREDICTED + 1))
        if not self.depth:
            self.end(f"{share:.0%} of its tokens were accepted")
        if self._tried >= 2 * _TRIED:
            self._tried, self._right = self._tried // 2, self._right // 2

    def end(self, reason: str) -> None:
        self.depth, self.ended = 0, f"the checkpoint's own head drafts no more: {reason}"

    def draft(self) -> None:
        """Drafts behind the pass that was kept, once it is committed. Changes nothing else, whatever it raises."""
        passed, self._passed = self._passed, []
        if self.ended:
            self._leave()
            return
        going: list[tuple[Sequence, torch.Tensor]] = []
        for chunk in chain.from_iterable(batch.chunks for batch, _ in passed):
            _ids(chunk.sequence).clear()
        depth = min(self.depth, self._room(sum(len(batch.sampling) for batch, _ in passed)))
        for left, (batch, hidden) in zip(reversed(range(len(passed))), passed, strict=True):
            seen = list(_seen(batch.chunks))
            if depth and seen:
                states = hidden[
                    torch.tensor([row for old, new in seen for row in _rows(old, new)], device=hidden.device)
                ]
                going += self._draft([new for _, new in seen], states, left > 0 or depth > 1)
        grown, last = [sequence for sequence, _ in going if self._grows(sequence, depth - 1)], dict(going)
        try:
            for left in reversed(range(depth - 1)):
                if chosen := [each for each in grown if len(_ids(each)) < _most(each)]:
                    chunks = [_next(sequence, row) for row, sequence in enumerate(chosen)]
                    last = dict(self._draft(chunks, torch.stack([last[each] for each in chosen]), left > 0))
        finally:
            for sequence in grown:
                self._scheduler.cache.shrink(sequence.table)

    def _leave(self) -> None:
        if self._left:
            return
        self._left, scheduler = True, self._scheduler
        for sequence in (*scheduler.running, *scheduler.waiting, *scheduler.urgent):
            for each in (sequence, *sequence.forks):
                self.of(each)
        self._head.leave()

    def _room(self, sequences: int) -> int:
        """Tokens that the next pass has room for behind each of the last ones."""
        free = self._scheduler.limits.free_tokens
        least = free[min(len(free), sequences.bit_length()) - 1] if free and sequences else 0
        return max(1, least // max(1, sequences) - 1)

    def _grows(self, sequence: Sequence, count: int) -> bool:
        """Gives a sequence slots for `count` tokens more, in free blocks, for the head alone."""
        table, cache = sequence.table, self._scheduler.cache
        return count > 0 and cache.headroom(table) >= count and cache.grow(table, table.num_tokens + count)

    def _draft(
        self, chunks: list[TokenChunk], hidden: torch.Tensor, again: bool
    ) -> list[tuple[Sequence, torch.Tensor]]:
        """Lets the head see `chunks`, and adds the next token to the drafts of those with their sequence's last one."""
        samples = [chunk for chunk in chunks if chunk.samples]
        token_ids = [token for chunk in chunks for token in _behind(chunk)]
        positions = [chunk.past + index for chunk in chunks for index in range(chunk.count)]
        rows = torch.tensor([chunk.end - 1 for chunk in samples], dtype=torch.long)
        batch = Batch(tuple(chunks), torch.tensor([token_ids]), torch.tensor([positions]), rows, ())
        found, states = self._head.forward(batch, hidden, again)
        sequences = [chunk.sequence for chunk in samples]
        for sequence, token_id in zip(sequences, found.tolist(), strict=True):
            _ids(sequence).append(token_id)
        return [*zip(sequences, states, strict=True)]


def _seen(chunks: Iterable[TokenChunk]) -> Iterator[tuple[TokenChunk, TokenChunk]]:
    """The chunks of a pass whose sequences go on, and what the head sees of each: what came to be stored."""
    begin = 0
    for chunk in chunks:
        sequence = chunk.sequence
        stored = sequence.table.num_tokens
        count = min(chunk.count, stored - chunk.past)
        if sequence.status is SequenceStatus.RUNNING and count > 0:
            last = chunk.past + count == stored == sequence.num_tokens - 1
            yield chunk, TokenChunk(sequence, begin, chunk.past, count, last, drafted=count - 1 if chunk.decodes else 0)
            begin += count


def _rows(old: TokenChunk, new: TokenChunk) -> range:
    """The rows of a pass that the head sees."""
    return range(old.begin, old.begin + new.count)


def _next(sequence: Sequence, row: int) -> TokenChunk:
    """The token drafted last of a sequence, at the position before it."""
    return TokenChunk(sequence, row, sequence.num_tokens - 2 + len(_ids(sequence)), 1, True)


def _behind(chunk: TokenChunk) -> list[int]:
    """The tokens behind those of a chunk, drafted ones behind the sequence's."""
    sequence, begin, end = chunk.sequence, chunk.past + 1, chunk.past + 1 + chunk.count
    return sequence.tokens(begin, min(end, sequence.num_tokens)) or _ids(sequence)[-1:]


def _ids(sequence: Sequence) -> list[int]:
    assert isinstance(sequence.lookup, HeadDrafts)
    return sequence.lookup.ids


def _most(sequence: Sequence) -> int:
    """Tokens that may be drafted behind its last one: at most what it has left beside the next one."""
    return sequence.max_tokens - sequence.num_tokens - 1
