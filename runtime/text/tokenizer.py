"""The tokenizer of one model: prompts to token ids, token ids to text.

In every prompt, control tokens come from the model's own template and never from the text of a row. Knows no rows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from datetime import datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from tokenizers import Tokenizer as Backend

from ...offload.closing import Closing
from ..settings.errors import PromptError, TokenizerError
from ..settings.settings import ENCODED_NBYTES, TEXT_NBYTES_PER_TOKEN
from .chat_stream import ChatStream, Harmony, StreamOptions, find_format, open_stream
from .control_tokens import ControlTokens, Marks, Piece, PlainText, bounded_encoding, check_text
from .folder import TokenizerFolder, read_folder
from .messages import Message
from .stream import TextStream, decoding
from .template import ChatTemplate

# What one piece is, and the tokens by which two pieces may differ from the text that they are cut from.
_PIECE_CHARS, _CUT_TOKENS = 16 << 10, 64


class TokenText(NamedTuple):
    """One token as shown beside its probability; `text` has U+FFFD where `data` is not whole characters."""

    text: str
    data: bytes


class Tokenizer(Closing):
    """Encodes prompts and decodes answers; one thread at a time. Close it to end its template's process."""

    def __init__(self, folder: TokenizerFolder, now: datetime) -> None:
        """`now` is the date that templates get when they ask for it."""
        self.eos_token_ids = folder.eos_token_ids
        self.chat_template = folder.template
        self._special_tokens = folder.special_tokens
        self._backend = folder.backend
        self._controls = ControlTokens(folder.backend, folder.template or "", folder.unknown_id)
        self._encoder = Encoder(folder.backend, self._controls.ids)
        self._decoding = decoding(folder.backend)
        self.answer_format = find_format(folder.backend, folder.template or "", self._encoder.middle)
        self._chat: ChatTemplate | None = None
        if folder.template is not None:
            self._chat = ChatTemplate(folder.template, folder.special_tokens, self._controls, now)

    @classmethod
    def load(cls, folder: Path, now: datetime | None = None) -> Self:
        """The tokenizer in a model folder; raises `TokenizerError`. Without `now` it is the time of this call."""
        return cls(read_folder(folder), now or datetime.now())

    def dated(self, now: datetime) -> Self:
        """The same with another date for templates, in a process of its own; both share the vocabulary."""
        other = copy(self)
        if self._chat is not None:
            other._chat = self._chat.dated(now)
        return other

    @property
    def num_tokens(self) -> int:
        """Ids of the vocabulary with its added tokens; a model's logits are often wider."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that texts leave out."""
        return self._decoding.vocabulary.special_ids

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt that is to be continued, with what the tokenizer itself adds (such as BOS).

        Raises `PromptError`.
        """
        check_text(text, "the prompt")
        spans = self._controls.spans(text)
        if not spans:
            return self._encoder.text(text)
        marks = Marks([text], spans, avoid="")
        return self._encoder.pieces(marks.pieces(marks.texts[0]), affixes=True)

    def at_least(self, texts: Iterable[str], most: int) -> int:
        """How many tokens a prompt of `texts` has at least, counted up to somewhat more than `most`; 0 for a short one.

        In pieces, and no further: encoding takes hundreds of times the bytes of a text (`encoder_nbytes`). A piece may
        begin inside a word, so that there are a few tokens more than in the whole. Raises `PromptError` for texts that
        have far more bytes than `most` tokens have anywhere.
        """
        texts = list(texts)
        if (nbytes := sum(len(text.encode(errors="replace")) for text in texts)) <= ENCODED_NBYTES:
            return 0
        count = 0
        for text in texts:
            for begin in range(0, len(text), _PIECE_CHARS):
                count += len(self._encoder.prompt(text[begin : begin + _PIECE_CHARS])) - _CUT_TOKENS
                if count > most:
                    return count
        if nbytes > TEXT_NBYTES_PER_TOKEN * most:
            raise PromptError(
                f"the prompt has {nbytes} bytes and at least {max(0, count)} tokens; at most {TEXT_NBYTES_PER_TOKEN} "
                f"bytes for each of {most} tokens are encoded; shorten its longest repetitions or runs of blanks"
            )
        return max(0, count)

    def encode_verbatim(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text in which the names of control tokens are control tokens: for texts that a program wrote,
        such as a rendered template, and not for those of people."""
        check_text(text, "the text")
        return self._encoder.text(text) if add_special_tokens else self._encoder.prompt(text)

    def special_token_id(self, name: str) -> int | None:
        """The id of `bos_token`, `eos_token` or another one that transformers has a name for; None without one."""
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(str(token))

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """The ids of the model's chat prompt for its next answer; `variables` are further ones of its template.

        Raises `PromptError`, `TemplateError` among them.
        """
        if self._chat is None:
            raise PromptError("The model has no chat template; give its rows as prompts to complete, not as messages.")
        return self._encoder.pieces(self._chat.pieces(messages, tools, variables), affixes=False)

    def template_reads(self, name: str) -> bool:
        """Whether the chat template mentions a variable."""
        return self._chat is not None and self._chat.reads(name)

    @property
    def chat_stop_ids(self) -> frozenset[int]:
        """Tokens beside those of `eos_token_ids` that end a chat answer."""
        return frozenset() if self.answer_format is None else self.answer_format.stop_ids

    @property
    def marks_calls(self) -> bool:
        """Whether it is known how the model's answers mark calls of functions."""
        return isinstance(self.answer_format, Harmony) or self.writes_json_calls

    @property
    def writes_json_calls(self) -> bool:
        """Whether the model is asked to write calls of functions as JSON between `<tool_call>` tags."""
        return self._chat is not None and self._chat.writes_json_calls

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`, without special tokens unless they are asked for."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, stops: Sequence[str] = (), *, min_tokens: int = 0) -> TextStream:
        """A text that grows token by token and ends before the first of `stops` behind its first `min_tokens`."""
        return TextStream(self._decoding.detokenizer(), stops, min_tokens=min_tokens)

    def chat_stream(self, prompt_ids: Sequence[int], options: StreamOptions) -> ChatStream | None:
        """The answer to a chat prompt, split into its parts; None where the model's parts have no known marks."""
        if self.answer_format is None:
            return None
        return open_stream(self.answer_format, self._decoding, prompt_ids, options)

    def token_text(self, token_id: int) -> TokenText:
        """The token by itself, as in the middle of a text."""
        data = self._decoding.data(token_id)
        return TokenText(data.decode(errors="replace"), data)

    def close(self) -> None:
        """Ends the template's process; the tokenizer stays usable."""
        if self._chat is not None:
            self._chat.close()


class Encoder:
    """Pieces of text to token ids; a literal piece never becomes one of `control_ids`. Knows nothing of templates."""

    def __init__(self, backend: Backend, control_ids: frozenset[int]) -> None:
        """Raises `TokenizerError` if what the tokenizer adds around a text cannot be distinguished from the text."""
        self._backend = backend
        self._control_ids = control_ids
        # For text from the middle of an answer, in which the names of control tokens are control tokens.
        self.middle = _after_newline(self.prompt)
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
                ids += self.middle(piece.text) if index else self.prompt(piece.text)
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


def _affixes(backend: Backend) -> tuple[list[int], list[int]]:
    bare = bounded_encoding(backend, "a").ids
    full = bounded_encoding(backend, "a", affixes=True).ids
    begin = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), None)
    if not bare or begin is None:
        raise TokenizerError(
            f"The tokenizer reads 'a' as {bare}, and as {full} with the tokens it adds around a text; use a checkpoint "
            "whose vocabulary has that letter and whose tokens are before or after the text."
        )
    return full[:begin], full[begin + len(bare) :]
