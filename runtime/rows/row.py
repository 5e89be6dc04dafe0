"""One row of a job, read and checked: what to continue, how, and what its answer must carry.

Knows no file, no JSON and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b

from ..sampling.params import SamplingParams
from .failure import ErrorCode, RowFailure


def row_seed(job_seed: int, row_id: str) -> int:
    """63 bits for a row that names no seed: equal prompts under different ids get different samples."""
    return _hash63(f"{job_seed}:{row_id}", b"moedge.row")


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice of a row; the first choice uses the row's seed as it is."""
    return seed if choice == 0 else _hash63(f"{seed}:{choice}", b"moedge.choice")


def _hash63(text: str, purpose: bytes) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8, person=purpose).digest()) >> 1


class Endpoint(Enum):
    """Which contract a row was written in; it decides the shape of the answer."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    SHORT = "short"


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that is continued as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids that are continued as they are."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages that go through the model's chat template."""

    messages: tuple[Message, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Defaults(SamplingParams):
    """Values for absent fields of a row; the seed of each row is derived from `seed`, the seed of the job.

    `logprobs` has no default: only a row itself can ask for them.
    """

    max_tokens: int = 256


@dataclass(frozen=True, slots=True)
class Row:
    """`index` counts rows from 0, `line` counts the file's lines from 1; blank lines make them differ.

    `schema` is the text of a JSON schema that every answer must follow.
    """

    index: int
    line: int
    id: str
    endpoint: Endpoint
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    num_samples: int = 1
    model: str | None = None
    return_token_ids: bool = False
    schema: str | None = None

    @property
    def short(self) -> bool:
        return self.endpoint is Endpoint.SHORT

    def failure(self, code: ErrorCode, message: str, param: str | None = None) -> RowFailure:
        """Of this row."""
        return RowFailure(code, message, param, self.index, self.line, self.id, self.short)

    def choices(self) -> Iterator[tuple[int, SamplingParams]]:
        """The row's sequences in the order of its answer: all samples of a prompt, which is counted from 0, then the
        next prompt."""
        # The first keeps the row's seed; most rows have no other.
        yield 0, self.params
        for choice in range(1, len(self.prompts) * self.num_samples):
            seed = choice_seed(self.params.seed, choice)
            yield choice // self.num_samples, replace(self.params, seed=seed)
