"""What is to be generated, as far as planning wants to know. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobShape:
    """`sequences` of at most `longest` tokens, prompt included.

    `shortest` is the least that any of them needs. `prompt_tokens` and `generated_tokens`, the latter at most, are sums
    over all of them. None is not known.
    """

    sequences: int
    longest: int
    shortest: int | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None

    @property
    def least(self) -> int:
        """Tokens that the cache must hold for the job to make sense."""
        return self.longest if self.shortest is None else self.shortest

    @property
    def mean_prompt(self) -> float:
        return self.longest / 2 if self.prompt_tokens is None else self.prompt_tokens / self.sequences

    @property
    def mean_generated(self) -> float:
        """Most tokens to generate, of the mean sequence."""
        if self.generated_tokens is None:
            return max(1.0, self.longest - self.mean_prompt)
        return max(1.0, self.generated_tokens / self.sequences)

    @property
    def mean_live(self) -> float:
        """Tokens that a sequence holds in the mean over its life, if answers end halfway."""
        return self.mean_prompt + self.mean_generated / 4
