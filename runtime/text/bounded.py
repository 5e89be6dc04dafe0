"""A tokenizer's patterns are the publisher's, and backtrack: encoding runs within limits.

Oniguruma, which runs them, gives one attempt to match ten million steps (about 0.2 s) and then raises; but it makes an
attempt at every character of a text, so patterns that stay just below could hold a job up for days.
"""

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from tokenizers import Encoding, Tokenizer

from .errors import PromptError, TokenizerError

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
