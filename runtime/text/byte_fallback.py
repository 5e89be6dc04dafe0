"""SentencePiece tokens: text with a mark for space, or a single byte written `<0xE2>`."""

import codecs
import re

from tokenizers import Tokenizer

from .vocabulary import Vocabulary

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
        """The byte that `token` stands for, or nothing if it stands for text."""
        match = _BYTE.fullmatch(token) if self._has_bytes else None
        return bytes.fromhex(match.group(1)) if match else b""

    def text(self, token: str, first: bool) -> str:
        """The text that `token`, which is no byte, stands for at the beginning of a text or in its middle."""
        if first:
            return str(self._decoder.decode([token]))
        text = self._middles.get(token)
        if text is None:
            text = self._middles[token] = str(self._decoder.decode([_ANCHOR, token])[len(_ANCHOR) :])
        return text

    def detokenizer(self) -> "ByteFallbackDetokenizer":
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
