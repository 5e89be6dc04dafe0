"""Byte-level tokens: every character of a token stands for one byte (GPT-2's alphabet)."""

import codecs

from tokenizers import Tokenizer

from .vocabulary import Vocabulary


def _alphabet() -> dict[str, int]:
    """Printable bytes stand for themselves, the others for the characters from U+0100 on (GPT-2 `bytes_to_unicode`)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class ByteLevel:
    """The decoding of a tokenizer whose decoder is ByteLevel."""

    def __init__(self, backend: Tokenizer) -> None:
        self.vocabulary = Vocabulary(backend)
        self._bytes = _alphabet()
        self._data: dict[int, bytes] = {}

    def data(self, token_id: int) -> bytes:
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

    def detokenizer(self) -> "ByteLevelDetokenizer":
        return ByteLevelDetokenizer(self)


class ByteLevelDetokenizer:
    """Bytes in, characters out; a character settles with its last byte."""

    open = ""

    def __init__(self, decoding: ByteLevel) -> None:
        self._decoding = decoding
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def rest(self) -> str:
        pending, _ = self._utf8.getstate()
        return pending.decode(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._decoding.vocabulary.special_ids:
            return ""
        return self._utf8.decode(self._decoding.data(token_id))
