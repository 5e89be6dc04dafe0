"""What is to be generated, as far as planning wants to know. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobShape:
    """`sequences` of at most `longest` tokens, prompt included.

    `shortest` is the least that any of them needs, `prompt_tokens` the sum over their prompts; None is not known.
    """

    sequences: int
    longest: int
    shortest: int | None = None
    prompt_tokens: int | None = None

    @property
    def least(self) -> int:
        """Tokens that the cache must hold for the job to make sense."""
        return self.longest if self.shortest is None else self.shortest

    @property
    def mean_prompt(self) -> float:
        return self.longest / 2 if self.prompt_tokens is None else self.prompt_tokens / self.sequences
