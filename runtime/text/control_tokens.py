"""What a text must not hold before it is tokenized: its limits, and imitations of control tokens."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ..settings.errors import PromptError, TokenizerError

if TYPE_CHECKING:
    # A folder is read, and much is refused, before the library is imported.
    from tokenizers import AddedToken, Encoding, Tokenizer

MAX_TEXT_NBYTES = 16 << 20
_OUTPUT_FACTOR = 8
_OUTPUT_SLACK_NBYTES = 64 << 10


def check_text(text: str, what: str) -> None:
    """Raises `PromptError` if `text` is larger than the cap or has no UTF-8 form; `what` names it in the message."""
    if len(text) <= MAX_TEXT_NBYTES:
        try:
            nbytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise PromptError(
                f"{what} holds the lone surrogate \\u{ord(text[error.start]):04x} at character {error.start}, "
                "which is not a character; use valid Unicode text."
            ) from None
        if nbytes <= MAX_TEXT_NBYTES:
            return
    raise PromptError(
        f"{what} has {len(text)} characters; the largest accepted text is {MAX_TEXT_NBYTES >> 20} MiB of UTF-8; "
        "split it into several rows."
    )


def output_limit(request_nbytes: int) -> int:
    """The most bytes of UTF-8 that a template may render from a request of this many bytes."""
    return _OUTPUT_FACTOR * request_nbytes + _OUTPUT_SLACK_NBYTES


# The largest text that is accepted takes about a second.
ENCODE_LIMIT_S = 60.0
T = TypeVar("T")


def bounded_encoding(backend: Tokenizer, text: str, affixes: bool = False) -> Encoding:
    """The encoding of `text`, with what the tokenizer adds around it if `affixes`.

    Raises `PromptError` where a pattern gives up on the text, `TokenizerError` where it takes longer than the limit.
    """
    # Of the library's functions the one that releases Python's lock, without which no limit could be kept.
    return within(ENCODE_LIMIT_S, lambda: backend.encode_batch([text], add_special_tokens=affixes))[0]


def within(limit_s: float, call: Callable[[], T]) -> T:
    """The result of `call`, made in a thread that is left behind when it takes longer."""
    answers: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    # Ends with the process: nothing can stop a match.
    Thread(target=run, daemon=True).start()
    try:
        result, error = answers.get(timeout=limit_s)
    except Empty:
        raise TokenizerError(
            f"The tokenizer worked for more than {limit_s:g} s on one text, where a second is usual: its patterns "
            "explode; use a checkpoint with another tokenizer.json."
        ) from None
    if isinstance(error, Exception):
        raise error
    if error is not None:
        raise PromptError(f"The tokenizer's patterns gave up on this text ({error}); change the text.") from None
    return result  # type: ignore[return-value]


class PlainText:
    """The pipeline of `backend` without its added tokens and without what it puts around a text."""

    def __init__(self, backend: Tokenizer) -> None:
        self._pipeline = type(backend)(backend.model)
        if backend.normalizer is not None:
            self._pipeline.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._pipeline.pre_tokenizer = backend.pre_tokenizer

    def ids(self, text: str) -> list[int]:
        """The ids the model part gives `text`, in which no added token is recognized."""
        return list(bounded_encoding(self._pipeline, text).ids)


_BRACKETED = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
_UNKNOWN = "\0"


class Span(NamedTuple):
    """Characters [start, stop) of a text that a tokenizer would read as a control token."""

    start: int
    stop: int
    special: bool


class ControlTokens:
    """The control tokens of `backend`, for texts that must not contain any.

    Every special token is one. So is another added token if it looks like `<|this|>`, or if the chat template's source
    contains it and it is no mere word or space. `<think>` is found this way, while table tags and runs of spaces, which
    some vocabularies hold as added tokens, stay ordinary text.
    """

    def __init__(self, backend: Tokenizer, template: str, unknown_id: int | None) -> None:
        """Raises `TokenizerError` if plain text can become a special token."""
        controls, plain = {}, PlainText(backend)
        for token_id, token in backend.get_added_tokens_decoder().items():
            if not token.content or not _is_control(token, template):
                continue
            if token_id == unknown_id or token_id not in plain.ids(token.content):
                controls[token_id] = token
            # Some checkpoints call a mere character special, such as "!" for padding: it stays a character.
            elif token.special and len(token.content) > 1:
                raise TokenizerError(
                    f"The tokenizer writes its control token {token.content!r} when it reads that text, so text cannot "
                    "be kept apart from control; use a checkpoint with a byte-level or byte-fallback BPE tokenizer."
                )
        # Characters outside the vocabulary come out as the unknown token: no text gains anything by that.
        self.ids: frozenset[int] = frozenset(controls) - {unknown_id}
        self._special = {token.content for token in controls.values() if token.special}
        longest_first = sorted((token.content for token in controls.values()), key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._matcher = _matcher(backend, controls.values())

    def spans(self, text: str) -> list[Span]:
        """The imitations of control tokens in `text`, in order, without overlap."""
        found = [
            Span(match.start(), match.end(), match.group() in self._special) for match in self._literal.finditer(text)
        ]
        if self._matcher is not None:
            encoding = bounded_encoding(self._matcher, text)
            found += [
                Span(*offsets, token in self._special)
                for token, offsets in zip(encoding.tokens, encoding.offsets, strict=True)
                if token != _UNKNOWN
            ]
        return _merged(sorted(found))


def _is_control(token: AddedToken, template: str) -> bool:
    if token.special or _BRACKETED.fullmatch(token.content):
        return True
    # Without its letters and spaces something must be left: "user" in a template is a word.
    has_sign = re.search(r"[^\w\s]", token.content) is not None
    return has_sign and token.content in template


def _matcher(backend: Tokenizer, controls: Iterable[AddedToken]) -> Tokenizer | None:
    """A tokenizer that knows nothing but `controls`, to find those that appear only once a text is normalized."""
    from tokenizers import AddedToken, Tokenizer, models

    normalized = [AddedToken(token.content, normalized=True) for token in controls if token.normalized]
    if backend.normalizer is None or not normalized:
        return None
    matcher = Tokenizer(models.WordLevel({_UNKNOWN: 0}, unk_token=_UNKNOWN))
    matcher.normalizer = backend.normalizer
    matcher.add_tokens(normalized)
    return matcher


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for span in spans:
        if merged and span.start < merged[-1].stop:
            last = merged[-1]
            merged[-1] = Span(last.start, max(last.stop, span.stop), last.special or span.special)
        else:
            merged.append(span)
    return merged


_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class Piece(NamedTuple):
    """A stretch of a prompt; in a literal one the names of control tokens are mere text."""

    text: str
    literal: bool


class Marks:
    """The marks of one prompt: two characters that occur in none of its texts."""

    def __init__(self, texts: Sequence[str], spans: Sequence[Span], avoid: str) -> None:
        """Marks `spans`, which count characters through all `texts`; `avoid` is text that the template may add.

        Raises `PromptError` if the texts leave no two private-use characters.
        """
        used = set(avoid).union(*texts)
        free = list(islice((chr(code) for code in _PRIVATE_USE if chr(code) not in used), 2))
        if len(free) < 2:
            raise PromptError("The text uses up the private-use characters U+F0000 to U+FFFFD; leave two of them out.")
        self._start, self._stop = free
        self._names: set[str] = set()
        begins = accumulate(map(len, texts), initial=0)
        # The texts with their marks.
        self.texts = [self._marked(text, begin, spans) for text, begin in zip(texts, begins, strict=False)]

    def pieces(self, text: str) -> Iterator[Piece]:
        """`text`, which a template made of the marked texts, cut at the marks and without them."""
        start, stop = self._start, self._stop
        # Split with a group: cut text and marked text take turns, None is a mark without its partner.
        for index, part in enumerate(re.split(f"{start}([^{start}{stop}]*){stop}|[{start}{stop}]", text)):
            if part:
                yield Piece(part, literal=index % 2 == 1 and part in self._names)

    def _marked(self, text: str, begin: int, spans: Sequence[Span]) -> str:
        first = bisect_right(spans, begin, key=lambda span: span.stop)
        last = bisect_left(spans, begin + len(text), key=lambda span: span.start)
        parts, done = [], 0
        for span in spans[first:last]:
            # A span may begin in the text before this one, or end in the next.
            start, stop = max(span.start - begin, 0), min(span.stop - begin, len(text))
            name = text[start:stop]
            self._names.add(name)
            parts += [text[done:start], self._start, name, self._stop]
            done = stop
        return "".join([*parts, text[done:]])
