"""A sequence: one prompt and what was generated for it, from waiting to finished."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from ..kv.usage import BlockTable
from ..sampling.draw import TokenHistory
from ..sampling.grammar import GrammarState
from ..sampling.params import FinishReason, SamplingParams, TokenLogprob


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class StopText(Protocol):
    """Turns tokens into text as they come and knows when a stop string is complete."""

    stopped: bool

    def append(self, token_id: int) -> None: ...


class AnswerParts(Protocol):
    """Knows from the tokens of an answer in which part of it the next one is; the same object follows its text.

    Where it is not `masked` a grammar does not apply. `begin_id` may come although the grammar forbids it: it begins
    the reasoning before the answer. `forced` must come next, if it is not None.
    """

    @property
    def masked(self) -> bool: ...

    @property
    def begin_id(self) -> int | None: ...

    @property
    def forced(self) -> int | None: ...


@dataclass(slots=True)
class Clock:
    """Seconds (monotonic) at which a sequence was added, gave its first token, and ended."""

    added: float = field(default_factory=time.monotonic)
    first_token: float = 0.0
    ended: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """`table.num_tokens` tokens of `token_ids` have their keys and values in the cache; the rest is pending.

    `sample` tells the n continuations of one prompt apart. `forks` are those that share this one's prompt and part
    from it where the prompt ends. `grammar` allows its tokens, where it is asked for one, and where `parts` says so,
    for answers that have parts. `num_lost` tokens were stored when it was preempted. `finish_reason` is None until it
    is finished.
    """

    prompt_ids: list[int]
    params: SamplingParams
    eos_ids: frozenset[int] = frozenset()
    sample: int = 0
    text: StopText | None = None
    grammar: GrammarState | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    table: BlockTable = field(default_factory=BlockTable)
    clock: Clock = field(default_factory=Clock)
    finish_reason: FinishReason | None = None
    error: str = ""
    history: TokenHistory | None = None
    forks: list[Sequence] = field(default_factory=list)
    num_lost: int = 0
    parts: AnswerParts | None = None

    def __post_init__(self) -> None:
        if self.params.penalised:
            self.history = TokenHistory(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.table.num_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens that it holds at most, prompt included."""
        return len(self.prompt_ids) + self.params.max_tokens

    @property
    def masked(self) -> bool:
        """Whether its grammar, if it has one, applies to the next token."""
        return self.parts is None or self.parts.masked

    @property
    def begin_id(self) -> int | None:
        return None if self.parts is None else self.parts.begin_id

    @property
    def forced(self) -> int | None:
        return None if self.parts is None else self.parts.forced

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Tokens that would end it too early: before `min_tokens`, or before an answer that has to follow a grammar."""
        too_short = len(self.output_ids) < self.params.min_tokens
        if not too_short and (self.grammar is None or self.masked):
            return ()
        ending = set() if self.params.ignore_eos else set(self.eos_ids)
        return tuple(sorted(ending.union(self.params.stop_token_ids if too_short else ())))

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def tokens(self, begin: int, end: int) -> list[int]:
        """The token ids at positions begin to end."""
        prompt = len(self.prompt_ids)
        if begin >= prompt:
            return self.output_ids[begin - prompt : end - prompt]
        return self.prompt_ids[begin:end] + self.output_ids[: max(0, end - prompt)]

    def append(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Takes a sampled token and finishes the sequence where it ends it."""
        if not self.output_ids:
            self.clock.first_token = time.monotonic()
        self.output_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.history is not None:
            self.history.append(token_id)
        if self._ends(token_id):
            self.finish(FinishReason.STOP)
        elif self.grammar is not None and self.grammar.error:
            self.fail()
        elif len(self.output_ids) >= self.params.max_tokens:
            self.finish(FinishReason.LENGTH)

    def finish(self, reason: FinishReason, error: str = "") -> None:
        self.status = SequenceStatus.FINISHED
        self.finish_reason, self.error = reason, error
        self.clock.ended = time.monotonic()

    def fail(self) -> None:
        """Finishes a sequence for which there is no next token."""
        reason = self.grammar.error if self.grammar is not None else ""
        self.finish(FinishReason.ERROR, reason or "the model's logits are not finite numbers")

    def _ends(self, token_id: int) -> bool:
        if token_id in self.eos_ids and not self.params.ignore_eos:
            return True
        if token_id in self.params.stop_token_ids:
            return True
        # A token that begins or ends the reasoning belongs to no answer.
        masked = self.masked
        if self.text is not None:
            self.text.append(token_id)
            if self.text.stopped:
                return True
        if self.grammar is not None and masked and self.masked:
            self.grammar.append(token_id)
            return self.grammar.complete
        return False
