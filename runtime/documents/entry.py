"""What a job knows of a document: an entry of its index, written when the document was read and split."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """`chunks` are [start, end, first page, last page] with pages of 0 for texts that have none.

    `facts` are what prompts may use of the document. `error` says why it is not asked about.
    """

    source: str
    sha256: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    chunks: tuple[tuple[int, int, int, int], ...] = ()
    notes: tuple[str, ...] = ()
    error: Mapping[str, Any] | None = None

    @property
    def key(self) -> str:
        """Identifies the document by its path and its bytes."""
        return document_key(self.source, self.sha256)

    def pages(self, first: int, last: int) -> tuple[int, int] | None:
        """The pages of the chunks `first` to `last`, counted from 0."""
        pages = self.chunks[first][2], self.chunks[last][3]
        return pages if all(pages) else None

    def dumped(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()


def document_key(source: str, sha256: str) -> str:
    return blake2b(f"{sha256}:{source}".encode(), digest_size=10).hexdigest()


def row_id(key: str, level: int, index: int) -> str:
    """Of chunk `index` at level 0, and of the merge of that number at higher ones."""
    return f"{key}.{level}.{index}"


def read_entries(path: Path) -> Iterator[Entry]:
    """The entries of an index, one at a time."""
    with path.open("rb") as file:
        for line in file:
            found = json.loads(line)
            chunks = tuple(tuple(each) for each in found.pop("chunks"))
            yield Entry(**{**found, "notes": tuple(found["notes"])}, chunks=chunks)
