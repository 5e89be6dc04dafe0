"""Where one sequence stands in its grammar. Knows no logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .schema import first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher


class GrammarState:
    """One sequence's place in its grammar: a function of its output tokens, so preemption needs nothing of it.

    `complete`: nothing may follow. `error`: why the grammar cannot be followed further, else empty.
    """

    __slots__ = ("complete", "error", "mask_words", "matcher")

    def __init__(self, matcher: LLMatcher, mask_words: int) -> None:
        """`mask_words` 32-bit words hold one bit for each token of the matcher's vocabulary."""
        self.matcher = matcher
        self.mask_words = mask_words
        self.complete = False
        self.error = ""

    def append(self, token_id: int) -> None:
        """Takes the sequence's next token, which the mask allowed."""
        self.matcher.consume_token(token_id)
        self.check()
        self.complete = not self.error and self.matcher.is_stopped()

    def check(self) -> None:
        """Notes an error of the matcher, such as a parse that became too complex."""
        if self.matcher.is_error():
            self.error = "the schema cannot be followed: " + first_line(self.matcher.get_error())
