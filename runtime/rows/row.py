"""One row of a job, read and checked: what to continue, how, and what its answer must carry.

Knows no file, no JSON and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from ..sampling.params import SamplingParams
from .failure import ErrorCode, RowFailure

if TYPE_CHECKING:
    from ..sampling.grammar import AnswerForm


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
    """`beside`: what else the template gets of it, such as calls of functions; see text/messages.py."""

    role: str
    content: str
    beside: Mapping[str, Any] = field(default_factory=dict)


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
    """Messages that go through the model's chat template, with function tools and further variables of it."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Defaults(SamplingParams):
    """Values for absent fields of a row; the seed of each row is derived from `seed`, the seed of the job.

    `logprobs` and `prompt_logprobs` have no default: only a row itself can ask for them. `chat_template_kwargs` is the
    text of a JSON object, or nothing: a journal keeps it and compares it. `schema` is the text of a JSON schema. The
    others say what prompts are made of: `prompt_column` and `id_column` name fields of a row, `prompt` and `system` are
    templates over its fields, and `chat` makes prompts messages of a user; None is "as the model can".
    """

    max_tokens: int = 256
    chat_template_kwargs: str = ""
    reasoning_effort: str | None = None
    schema: str | None = None
    prompt_column: str | None = None
    id_column: str | None = None
    prompt: str | None = None
    system: str | None = None
    chat: bool | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """`index` counts rows from 0, `line` counts the file's lines from 1; blank lines make them differ.

    `schema` is the text of a JSON schema, or another grammar, that every answer must follow. `own` are the user's
    fields, which the answer repeats beside its own; `metadata` is OpenAI's field of that name, repeated in the answer's
    body.
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
    schema: AnswerForm | None = None
    own: Mapping[str, Any] = field(default_factory=dict, compare=False)
    metadata: Any = field(default=None, compare=False)

    @property
    def chat(self) -> bool:
        """Whether it is a conversation, not a text to continue."""
        return isinstance(self.prompts[0], ChatPrompt)

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Those that the model may call."""
        prompt = self.prompts[0]
        return prompt.tools if isinstance(prompt, ChatPrompt) else ()

    @property
    def short(self) -> bool:
        return self.endpoint is Endpoint.SHORT

    def failure(self, code: ErrorCode, message: str, param: str | None = None) -> RowFailure:
        """Of this row."""
        return RowFailure(code, message, param, self.index, self.line, self.id, self.short, self.own)

    def choices(self) -> Iterator[tuple[int, SamplingParams]]:
        """The row's sequences in the order of its answer: all samples of a prompt, which is counted from 0, then the
        next prompt."""
        # The first keeps the row's seed; most rows have no other.
        yield 0, self.params
        for choice in range(1, len(self.prompts) * self.num_samples):
            seed = choice_seed(self.params.seed, choice)
            yield choice // self.num_samples, replace(self.params, seed=seed)
