"""Pieces of text to token ids. Knows which pieces are literal; knows nothing of templates."""

from collections.abc import Callable, Iterable
from functools import cache

from tokenizers import Tokenizer

from ..settings.errors import PromptError, TokenizerError
from .control_tokens import Piece, PlainText
from .limits import bounded_encoding


class Encoder:
    """Encodes with `backend`; a literal piece never becomes one of `control_ids`."""

    def __init__(self, backend: Tokenizer, control_ids: frozenset[int]) -> None:
        """Raises `TokenizerError` if what the tokenizer adds around a text cannot be distinguished from the text."""
        self._backend = backend
        self._control_ids = control_ids
        self._with_controls = _after_newline(self.prompt)
        self._plain = _after_newline(PlainText(backend).ids)
        self._prefix, self._suffix = _affixes(backend)

    def text(self, text: str) -> list[int]:
        """The ids of a text that imitates no control token, with what the tokenizer adds around it."""
        return list(bounded_encoding(self._backend, text, affixes=True).ids)

    def prompt(self, text: str) -> list[int]:
        """The ids of a rendered prompt without imitations: its template has written what belongs around it."""
        return list(bounded_encoding(self._backend, text).ids)

    def pieces(self, pieces: Iterable[Piece], affixes: bool) -> list[int]:
        """The ids of `pieces` one after the other; `affixes` adds what the tokenizer adds around a text."""
        literal = cache(self._literal)
        ids = list(self._prefix) if affixes else []
        for index, piece in enumerate(pieces):
            if piece.literal:
                ids += literal(piece.text)
            else:
                ids += self._with_controls(piece.text) if index else self.prompt(piece.text)
        return ids + self._suffix if affixes else ids

    def _literal(self, text: str) -> list[int]:
        ids = self._plain(text)
        if not self._control_ids.isdisjoint(ids):
            raise PromptError(f"The tokenizer writes a control token when it reads {text!r} as text; remove it.")
        return ids


def _after_newline(encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
    """`encode` for text from the middle of a prompt.

    SentencePiece puts a space before a text; after a newline, whose ids are taken off again, it does not
    (transformers' `_encode_chat_piece`).
    """
    newline = encode("\n")

    def encode_middle(text: str) -> list[int]:
        ids = encode("\n" + text)
        return ids[len(newline) :] if ids[: len(newline)] == newline else encode(text)

    return encode_middle


def _affixes(backend: Tokenizer) -> tuple[list[int], list[int]]:
    bare = bounded_encoding(backend, "a").ids
    full = bounded_encoding(backend, "a", affixes=True).ids
    begin = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), None)
    if not bare or begin is None:
        raise TokenizerError(
            f"The tokenizer reads 'a' as {bare}, and as {full} with the tokens it adds around a text; use a checkpoint "
            "whose vocabulary has that letter and whose tokens are before or after the text."
        )
    return full[:begin], full[begin + len(bare) :]
