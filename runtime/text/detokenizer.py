"""Token ids to text, one at a time, exactly as the tokenizer decodes them all at once. Knows no stop strings.

The usual technique (decode a window, keep what grew: vLLM, TGI) is exact only for text that stays valid, and its window
grows for as long as the text is not. Here every token is one step on its bytes.
"""

import json
import re
from typing import Any, Protocol

from tokenizers import Tokenizer

from ..settings.errors import TokenizerError
from .token_bytes import ByteFallback, ByteLevel, Vocabulary

# Each step here works on single tokens until Fuse joins them; then a space may be stripped from the beginning.
_TOKENWISE = re.compile(r"Metaspace|(Replace ?)*(ByteFallback ?)?(Fuse( Strip)?)?")
_NO_STRIP: dict[str, Any] = {"type": "Strip", "content": "", "start": 0, "stop": 0}


class Detokenizer(Protocol):
    """The text of one sequence, growing token by token."""

    @property
    def open(self) -> str:
        """Whole characters after the settled text, which invalid bytes yet to come could take back."""

    @property
    def rest(self) -> str:
        """The text after the settled text if no token follows."""

    def push(self, token_id: int) -> str:
        """The text this token settles, which no later token can change."""


class Decoding(Protocol):
    """How one tokenizer's tokens become text."""

    vocabulary: Vocabulary

    def data(self, token_id: int) -> bytes:
        """The bytes of a token in the middle of a text; none for an id outside the vocabulary."""

    def detokenizer(self) -> Detokenizer:
        """A detokenizer at the beginning of a text."""


def decoding(backend: Tokenizer) -> Decoding:
    """Raises `TokenizerError` for a decoder whose text is not the sum of its tokens'."""
    steps = _steps(backend)
    kinds = " ".join(step["type"] for step in steps)
    if kinds == "ByteLevel":
        return ByteLevel(backend)
    if any("Regex" in step.get("pattern", {}) for step in steps):
        raise TokenizerError("The tokenizer's decoder replaces by a pattern, which may explode; use another one.")
    strip = steps[-1] if kinds.endswith("Strip") else _NO_STRIP
    if not kinds or not _TOKENWISE.fullmatch(kinds) or strip["start"] > 1 or strip["stop"]:
        raise TokenizerError(
            f"The tokenizer's decoder is {kinds or 'missing'}; byte-level, byte-fallback and metaspace decoders can be "
            "followed token by token: use a checkpoint with one of these."
        )
    return ByteFallback(backend, has_bytes="ByteFallback" in kinds, stripped=strip["content"] * strip["start"])


def _steps(backend: Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps
