"""Limits of a text before it is tokenized, and of the output of a template."""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from tokenizers import Encoding, Tokenizer

from ..settings.errors import PromptError, TokenizerError

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
