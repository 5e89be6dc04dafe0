"""One pass's work: which tokens of which sequences, packed into one row."""

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
    """The chunks of a pass and their T tokens as tensors.

    Shapes: token_ids [1, T], positions [1, T], logit_rows [R] (rows of T, one for each of `sampling`).
    """

    chunks: tuple[Chunk, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.chunks[-1].end if self.chunks else 0

    @property
    def sampling(self) -> list[Sequence]:
        return [sequence for chunk in self.chunks for sequence in chunk.sampling]


def pack(sequences: list[tuple[Sequence, int]]) -> Batch:
    """Packs (sequence, number of its pending tokens)."""
    chunks: list[Chunk] = []
    token_ids: list[int] = []
    positions: list[int] = []
    for sequence, count in sequences:
        past = sequence.table.num_tokens
        samples = count == sequence.num_pending
        forks = tuple(sequence.forks) if samples else ()
        chunks.append(Chunk(sequence, len(token_ids), past, count, samples, forks))
        token_ids += sequence.pending(count)
        positions += range(past, past + count)
    return Batch(
        tuple(chunks),
        torch.tensor([token_ids]),
        torch.tensor([positions]),
        torch.tensor([chunk.end - 1 for chunk in chunks for _ in chunk.sampling], dtype=torch.long),
    )
