"""The text of one file, and why there may be none."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# Seconds by the clock that a reader has for each of the processor: a busy machine, or Tesseract, takes them.
WAITING = 4


class ReadCode(StrEnum):
    """Why a file has no text; docs/documents.md lists them."""

    EMPTY = "document_empty"
    NO_TEXT = "document_no_text"
    ENCRYPTED = "document_encrypted"
    DAMAGED = "document_damaged"
    UNSUPPORTED = "document_unsupported"
    UNREADABLE = "document_unreadable"
    CHANGED = "document_changed"
    TOO_LARGE = "document_too_large"
    TIME_LIMIT = "document_time_limit"
    MEMORY_LIMIT = "document_memory_limit"
    CRASHED = "document_crashed"

    @property
    def permanent(self) -> bool:
        """Whether the same bytes would give it again, on any machine at any time."""
        return self in _PERMANENT


_PERMANENT = {ReadCode.EMPTY, ReadCode.ENCRYPTED, ReadCode.DAMAGED, ReadCode.UNSUPPORTED}


class ReadFailure(Exception):
    """A file could not be read. Never leaves the folder `documents`."""

    def __init__(self, code: ReadCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Content:
    """What a reader found: `pages` is the text, in one piece unless it is `paged`, as PDFs and slides are.

    `front_matter` are facts that the file states about itself: YAML front matter, headers of a mail, a title. `notes`
    say what was left out, or read in another way.
    """

    type: str
    pages: tuple[str, ...]
    paged: bool = False
    front_matter: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def blank(self) -> bool:
        return not any(page.strip() for page in self.pages)


# Control characters but tab, line feed and form feed.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f]")


def clean(text: str) -> str:
    """The text with \\n as its line end, without control characters, and without lone surrogates."""
    text = _CONTROLS.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
