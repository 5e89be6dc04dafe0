"""Text out of token ids, one at a time, exactly as the tokenizer decodes them all at once; and the text of one growing
sequence: where a stop string ends it, and what may be shown already.

The usual technique (decode a window, keep what grew: vLLM, TGI) is exact only for text that stays valid, and its window
grows for as long as the text is not. Here every token is one step on its bytes, which are those of GPT-2's byte-level
alphabet, or of SentencePiece's pieces with byte fallback. A token costs its own length, however long the text is.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from ..settings.errors import TokenizerError


class Vocabulary:
    """Token strings by id, as the vocabulary spells them."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def token(self, token_id: int) -> str:
        """Empty for an id outside the vocabulary: a model's logits are often padded beyond it."""
        return self._backend.id_to_token(token_id) or ""


class ByteLevel:
    """The decoding of a tokenizer whose decoder is ByteLevel."""

    def __init__(self, backend: Tokenizer) -> None:
        self.vocabulary = Vocabulary(backend)
        # Maps printable bytes to themselves and the others to the characters from U+0100 on (GPT-2 `bytes_to_unicode`).
        printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
        others = [byte for byte in range(256) if byte not in printable]
        self._bytes = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
        self._data: dict[int, bytes] = {}

    def data(self, token_id: int) -> bytes:
        """The bytes of a token in the middle of a text; none for an id outside the vocabulary."""
        data = self._data.get(token_id)
        if data is None:
            data = self._data[token_id] = self._spelled(token_id)
        return data

    def _spelled(self, token_id: int) -> bytes:
        token = self.vocabulary.token(token_id)
        try:
            return bytes([self._bytes[character] for character in token])
        except KeyError:
            # An added token is written as it reads: one character outside the alphabet gives it away.
            return token.encode()

    def detokenizer(self) -> ByteLevelDetokenizer:
        return ByteLevelDetokenizer(self)


class ByteLevelDetokenizer:
    """Bytes in, characters out; a character settles with its last byte."""

    # Whole characters after the settled text, which invalid bytes yet to come could take back.
    open = ""

    def __init__(self, decoding: ByteLevel) -> None:
        self._decoding = decoding
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def rest(self) -> str:
        """The text after the settled text if no token follows."""
        pending, _ = self._utf8.getstate()
        return pending.decode(errors="replace")

    def push(self, token_id: int) -> str:
        """The text this token settles, which no later token can change."""
        if token_id in self._decoding.vocabulary.special_ids:
            return ""
        return self._utf8.decode(self._decoding.data(token_id))


_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
# Any token before another makes the decoder treat the other as the middle of a text.
_ANCHOR = "a"


class ByteFallback:
    """The decoding of a tokenizer whose decoder works token by token, but for runs of bytes.

    `has_bytes`: `<0xE2>` is a byte, not text; `stripped` is taken from the beginning of the whole text.
    """

    def __init__(self, backend: Tokenizer, has_bytes: bool, stripped: str) -> None:
        self.vocabulary = Vocabulary(backend)
        self.stripped = stripped
        self._decoder = backend.decoder
        self._has_bytes = has_bytes
        self._middles: dict[str, str] = {}

    def data(self, token_id: int) -> bytes:
        token = self.vocabulary.token(token_id)
        if token_id in self.vocabulary.special_ids:
            return token.encode()
        return self.byte(token) or self.text(token, first=False).encode()

    def byte(self, token: str) -> bytes:
        """The byte that `token` is, or nothing if it is text."""
        match = _BYTE.fullmatch(token) if self._has_bytes else None
        return bytes.fromhex(match.group(1)) if match else b""

    def text(self, token: str, first: bool) -> str:
        """The text of `token`, which is not a byte, at the beginning of a text or in its middle."""
        if first:
            return str(self._decoder.decode([token]))
        text = self._middles.get(token)
        if text is None:
            text = self._middles[token] = str(self._decoder.decode([_ANCHOR, token])[len(_ANCHOR) :])
        return text

    def detokenizer(self) -> ByteFallbackDetokenizer:
        return ByteFallbackDetokenizer(self)


class ByteFallbackDetokenizer:
    """Text settles with its token, bytes with the end of their run.

    The tokenizers library turns every byte of a run into U+FFFD if the run as a whole is not UTF-8, so a run is open
    until another token ends it.
    """

    def __init__(self, decoding: ByteFallback) -> None:
        self._decoding = decoding
        self._first = True
        self._run = _Run()

    @property
    def open(self) -> str:
        return self._at_beginning(self._run.valid)

    @property
    def rest(self) -> str:
        return self._at_beginning(self._run.text)

    def push(self, token_id: int) -> str:
        token = self._decoding.vocabulary.token(token_id)
        if not token or token_id in self._decoding.vocabulary.special_ids:
            return ""
        if byte := self._decoding.byte(token):
            self._run.push(byte)
            return ""
        settled = self.rest
        if self._run.nbytes:
            self._run = _Run()
            self._first = False
        settled += self._decoding.text(token, self._first)
        self._first = False
        return settled

    def _at_beginning(self, text: str) -> str:
        return text.removeprefix(self._decoding.stripped) if self._first else text


class _Run:
    """Neighbouring byte tokens."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.valid = ""
        self._broken = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")()

    def push(self, byte: bytes) -> None:
        self.nbytes += 1
        if self._broken:
            return
        try:
            self.valid += self._utf8.decode(byte)
        except UnicodeDecodeError:
            self._broken = True
            self.valid = ""

    @property
    def text(self) -> str:
        """The run's text if it ends here."""
        pending, _ = self._utf8.getstate()
        return "\ufffd" * self.nbytes if self._broken or pending else self.valid


# Each step here works on single tokens until Fuse joins them; then a space may be stripped from the beginning.
_TOKENWISE = re.compile(r"Metaspace|(Replace ?)*(ByteFallback ?)?(Fuse( Strip)?)?")
_NO_STRIP: dict[str, Any] = {"type": "Strip", "content": "", "start": 0, "stop": 0}


# The text of one sequence, growing token by token.
Detokenizer = ByteLevelDetokenizer | ByteFallbackDetokenizer
# How one tokenizer's tokens become text.
Decoding = ByteLevel | ByteFallback


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


class TextStream:
    """Text from token ids, cut before the stop string that is complete first.

    Which one that is does not depend on how the text falls into tokens: it is as if characters came one by one. Of two
    that are complete at the same character the longer one cuts.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0, drop_newlines: bool = False
    ) -> None:
        """No stop string ends the text in its first `min_tokens` tokens; `drop_newlines` leaves out those it begins
        with. No stop string is empty: it would end every text before it begins.
        """
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._settled: list[str] = []
        self._fresh: list[str] = []  # the end of _settled that was not taken yet
        self._length = 0
        self._context = ""
        # A stop string that ends in text to come may begin one character short of its length before it.
        self._context_length = max(map(len, self._stops), default=1) - 1
        self._tokens_to_stops = min_tokens
        self._drop_newlines = drop_newlines
        self._ended = False
        self.stopped = False
        self.after = ""  # the stop string that ended the text, and what the last token has behind it

    @property
    def text(self) -> str:
        """The text if no token follows; without a stop string in it, what decoding all ids at once would give."""
        settled = "".join(self._settled)
        self._settled = [settled]
        return settled if self._ended else settled + self._detokenizer.rest

    def append(self, token_id: int) -> None:
        """Adds a token; once the text has ended, tokens add nothing."""
        if self._ended:
            return
        self._tokens_to_stops -= 1
        self.add(self._detokenizer.push(token_id))

    def add(self, piece: str) -> None:
        """Adds text that belongs to no token of this stream."""
        if self._ended:
            return
        if self._drop_newlines and not self._length:
            piece = piece.lstrip("\n")
        self._settle(piece)
        if self._stops and self._tokens_to_stops < 0:
            self._search(piece)

    def finish(self) -> None:
        """No token follows: what was still open becomes text."""
        if not self._ended:
            self._settle(self._detokenizer.rest)
            self._ended = True

    def take(self) -> str:
        """Text that was not taken before and stays whatever comes: no part of a character or of a stop string.

        When the text has ended it is all that is left, and the pieces taken are `text` together.
        """
        fresh = "".join(self._fresh)
        # Length of the longest end of `text` with which a stop string begins.
        lengths = (
            length
            for stop in self._stops
            for length in range(min(len(stop) - 1, len(fresh)), 0, -1)
            if fresh.endswith(stop[:length])
        )
        end = len(fresh) if self._ended else len(fresh) - max(lengths, default=0)
        self._fresh = [fresh[end:]]
        return fresh[:end]

    def _settle(self, piece: str) -> None:
        if piece:
            self._settled.append(piece)
            self._fresh.append(piece)
            self._length += len(piece)

    def _search(self, piece: str) -> None:
        settled = self._context + piece
        opened = self._detokenizer.open
        text = settled + opened
        for stop in self._stops:
            if stop in text:
                self._cut(self._length - len(settled) + self._first_stop(text), opened)
                return
        self._context = settled[max(0, len(settled) - self._context_length) :]

    def _first_stop(self, text: str) -> int:
        """The start of the stop string that ends first in `text`, which must contain one."""
        begins = [(text.find(stop), stop) for stop in self._stops]
        return min((begin + len(stop), begin) for begin, stop in begins if begin >= 0)[1]

    def _cut(self, end: int, opened: str) -> None:
        taken = self._length - sum(map(len, self._fresh))
        whole = "".join(self._settled) + opened
        text, self.after = whole[:end], whole[end:]
        self._settled, self._fresh = [text], [text[taken:]]
        self._ended = self.stopped = True
