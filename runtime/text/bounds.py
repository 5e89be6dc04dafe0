"""What a text may be before a tokenizer sees it, and how much a template may make of it."""

from .errors import PromptError

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
                "which is no character; write text that has a UTF-8 form."
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
