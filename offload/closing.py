"""A base class of what is closed when the block ends that opened it."""

from __future__ import annotations

from typing import Self


class Closing:
    """`with` calls `close` at its end, whatever ended it."""

    def close(self) -> None:
        """Frees what is held."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
