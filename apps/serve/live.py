"""One request whose answer somebody waits for: its sequences in the engine, and what each pass adds to its answer."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...face import Endpoint, InvalidRow, LoadedModel, OpenRow, Row, RowFailure, RowReader, errors, parse_object
from .errors import ApiError, of_failure, refused
from .files import new_id


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Text that does not change any more of one choice, and what `logprobs` says of tokens, where it was asked for:
    those of a token may come before its text, which may still become a stop string."""

    index: int
    reasoning: str
    content: str
    logprobs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The whole answer: the body of OpenAI's response."""

    body: dict[str, Any]


Event = AnswerPiece | Finished | ApiError


@dataclass(frozen=True, slots=True)
class Wanted:
    """How an answer is delivered: in pieces or whole, and whether its last piece counts tokens."""

    stream: bool
    usage: bool


class LiveRequest:
    """`advance` runs on the engine's thread; `cancel` may be called from any."""

    def __init__(self, opened: OpenRow, wanted: Wanted, model: str, reader: RowReader) -> None:
        self.row = opened.row
        self.opened = opened
        self.wanted = wanted
        self.model = model
        self.created = int(time.time())
        # Monotonic seconds.
        self.arrived = time.monotonic()
        self.cancelled = False
        self.answered = False
        self.emit: Callable[[Event], None] = lambda event: None
        self._reader = reader
        self._ended: set[int] = set()
        # Of each choice, the tokens whose logprobs were sent, and the characters of their texts.
        self._scored = [(0, 0)] * len(opened.sequences)
        # Calls of functions are found in the whole text.
        self._in_pieces = wanted.stream and not self.row.tools

    def begun(self) -> dict[str, Any]:
        """What a stream of the Responses API begins with."""
        return self._reader.begun(self.row, self.created)

    def cancel(self) -> None:
        """Nobody waits any more; its sequences are dropped before the next pass."""
        self.cancelled = True

    def advance(self) -> bool:
        """Emits what the last pass brought; returns whether the answer is complete."""
        for index, sequence in enumerate(self.opened.sequences):
            if index not in self._ended:
                self._advance(index, sequence.finished)
        if len(self._ended) < len(self.opened.sequences):
            return False
        found = self._reader.answer(self.opened, self.created)
        self.answered = not isinstance(found, RowFailure)
        self.emit(of_failure(found) if isinstance(found, RowFailure) else Finished(found))
        return True

    def _advance(self, index: int, finished: bool) -> None:
        if finished:
            self._ended.add(index)
        if self._in_pieces:
            reasoning, content = self.opened.take(index)
            logprobs = self._logprobs(index)
            if reasoning or content or logprobs:
                self.emit(AnswerPiece(index, reasoning, content, logprobs))

    def _logprobs(self, index: int) -> dict[str, Any] | None:
        """Those of the tokens that are new; None where there are none."""
        count, before = self._scored[index]
        tokens = self.opened.sequences[index].logprobs[count:]
        if not tokens:
            return None
        found = self._reader.logprobs(self.row, tokens, before)
        self._scored[index] = (count + len(tokens), before + sum(map(len, found.get("tokens", ()))))
        return found


class RequestReader:
    """Bodies of requests to sequences; from any thread, one after the other."""

    def __init__(self, loaded: LoadedModel, model: str, max_tokens: int, seed: int) -> None:
        """`max_tokens` and `seed` are for requests that do not say; `model` is the name that answers carry."""
        self._model = model
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._reader = RowReader(loaded, model, seed)

    def open(self, data: bytes, endpoint: Endpoint) -> LiveRequest:
        """Raises ApiError."""
        try:
            body = parse_object(data)
            wanted = _wanted(body)
            row = self._row(body, endpoint)
        except InvalidRow as error:
            raise of_failure(error.failure) from None
        most = None if _says_how_long(body, endpoint) else self._max_tokens
        with self._lock:
            try:
                opened = self._reader.open(row, most)
            except errors.TokenizerError as error:
                # Of a text on which the tokenizer works too long; the model has answered others.
                raise refused(str(error), endpoint.called("prompt")) from None
        if isinstance(opened, RowFailure):
            raise of_failure(opened)
        for sequence in opened.sequences:
            sequence.urgent = True
        return LiveRequest(opened, wanted, self._model, self._reader)

    def _row(self, body: Mapping[str, Any], endpoint: Endpoint) -> Row:
        fields = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        if not _says_how_long(body, endpoint):
            least = fields.get("min_tokens")
            fields[endpoint.called("max_tokens")] = max(1, least) if type(least) is int else 1
        return self._reader.row(fields, endpoint, new_id(""))


def _says_how_long(body: Mapping[str, Any], endpoint: Endpoint) -> bool:
    return any(body.get(endpoint.called(name)) is not None for name in ("max_tokens", "max_completion_tokens"))


def _wanted(body: Mapping[str, Any]) -> Wanted:
    stream, options = body.get("stream") or False, body.get("stream_options") or {}
    if not isinstance(stream, bool):
        raise refused("stream must be true or false", "stream", "invalid_type")
    if not isinstance(options, dict):
        raise refused("stream_options must be an object", "stream_options", "invalid_type")
    return Wanted(stream, options.get("include_usage") is True)
