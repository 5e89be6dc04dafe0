"""What the files of a folder come to, by some of them that were read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from .iterate import FoundFile


class AskedRow(NamedTuple):
    """A row of a document, and the tokens of its prompt."""

    row_id: str
    prompt: str
    num_tokens: int


@dataclass(slots=True)
class _Tally:
    """What the documents of one type came to."""

    files: int = 0
    nbytes: int = 0
    rows: int = 0
    tokens: int = 0

    def add(self, nbytes: int, rows: Sequence[AskedRow]) -> None:
        self.files += 1
        self.nbytes += nbytes
        self.rows += len(rows)
        self.tokens += sum(each.num_tokens for each in rows)


@dataclass(slots=True)
class Expected:
    """How many rows and prompt tokens all files come to, by those that were read, each type by itself."""

    files: Counter[str]
    nbytes: Counter[str]
    tallies: dict[str, _Tally] = field(default_factory=dict)

    @classmethod
    def of(cls, files: Sequence[FoundFile]) -> Self:
        found = cls(Counter(), Counter())
        for each in files:
            found.files[_suffix(each)] += 1
            found.nbytes[_suffix(each)] += each.nbytes
        return found

    def among(self, files: Sequence[FoundFile]) -> Self:
        """The same for other files, by what these came to."""
        found = self.of(files)
        found.tallies = self.tallies
        return found

    def add(self, found: FoundFile, rows: Sequence[AskedRow]) -> None:
        self.tallies.setdefault(_suffix(found), _Tally()).add(found.nbytes, rows)

    @property
    def rows(self) -> float:
        return sum(count * _share(each.rows, each.files) for count, each in self._types(self.files))

    @property
    def tokens(self) -> float:
        return sum(count * _share(each.tokens, each.nbytes) for count, each in self._types(self.nbytes))

    def _types(self, counts: Mapping[str, int]) -> Iterator[tuple[int, _Tally]]:
        """Of a type that was not read yet, the mean of all others is what is known."""
        every = _Tally()
        for each in self.tallies.values():
            every = _Tally(*(a + b for a, b in zip(astuple(every), astuple(each), strict=True)))
        return ((count, self.tallies.get(suffix, every)) for suffix, count in counts.items())


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _suffix(found: FoundFile) -> str:
    return Path(found.path).suffix.lower()
