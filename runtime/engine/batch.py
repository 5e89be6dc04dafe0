"""The tokens of a pass, packed into one row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` pending tokens of one sequence, at rows `begin` and on of the pass; `past` tokens are stored already.

    `samples` says that the chunk reaches the sequence's last token, so that the pass yields its next one, and the
    first one of each of its `forks`.
    """

    sequence: Sequence
    begin: int
    past: int
    count: int
    samples: bool
    forks: tuple[Sequence, ...] = ()

    @property
    def sampling(self) -> tuple[Sequence, ...]:
        """The sequences that get a token of the chunk's last row."""
        return (self.sequence, *self.forks) if self.samples else ()

    @property
    def end(self) -> int:
        return self.begin + self.count


@dataclass(frozen=True, slots=True)
class Batch:
    """The chunks of a pass, their T tokens as tensors, and the sequences that get a token of it.

    `scoring` holds (sequence, position) of the prompt tokens whose log-probabilities the pass gives. Shapes: token_ids
    [1, T], positions [1, T], logit_rows [R] (rows of T, one for each of `sampling`, then one for each of `scoring`).
    """

    chunks: tuple[Chunk, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    sampling: tuple[Sequence, ...]
    scoring: tuple[tuple[Sequence, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.chunks[-1].end if self.chunks else 0


def pack(sequences: list[tuple[Sequence, int]]) -> Batch:
    """Packs (sequence, number of its pending tokens)."""
    return _pack([(sequence, sequence.table.num_tokens, count) for sequence, count in sequences])


def cut_count(sequence: Sequence, past: int, count: int, cut: int) -> int:
    """At most `count` tokens behind `past`, so that the prompt ends there or is cut at a multiple of `cut`."""
    end = past + count
    return count if end >= len(sequence.prompt_ids) else max(0, end // cut * cut - past)


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """A batch of several tokens as two, to be run in their order: what the first stores the second may look back to."""
    cut = batch.num_tokens // 2
    first = [(each.sequence, each.past, min(each.count, cut - each.begin)) for each in batch.chunks if each.begin < cut]
    second = [
        (each.sequence, each.past + max(0, cut - each.begin), each.end - max(cut, each.begin))
        for each in batch.chunks
        if each.end > cut
    ]
    return _pack(first), _pack(second)


def _pack(parts: list[tuple[Sequence, int, int]]) -> Batch:
    """Packs (sequence, number of tokens that are stored, number of tokens that follow them)."""
    chunks: list[Chunk] = []
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    sampling: list[Sequence] = []
    scored_rows: list[int] = []
    scoring: list[tuple[Sequence, int]] = []
    for sequence, past, count in parts:
        samples = past + count == sequence.num_tokens
        forks = tuple(sequence.forks) if samples else ()
        chunk = Chunk(sequence, len(token_ids), past, count, samples, forks)
        chunks.append(chunk)
        token_ids += sequence.tokens(past, past + count)
        positions += range(past, past + count)
        sampling += chunk.sampling
        logit_rows += [chunk.end - 1] * len(chunk.sampling)
        for position in sequence.unscored(past, past + count):
            scored_rows.append(chunk.begin + position - past)
            scoring.append((sequence, position + 1))
    return Batch(
        tuple(chunks),
        torch.tensor([token_ids]),
        torch.tensor([positions]),
        torch.tensor(logit_rows + scored_rows, dtype=torch.long),
        tuple(sampling),
        tuple(scoring),
    )
