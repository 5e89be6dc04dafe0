"""A conversation to the pieces of a prompt, through the model's chat template, which runs in a process of its own.

The template is a program by the model's publisher: it may loop, allocate without end, or crash its interpreter. `Child`
knows frames and deadlines, `TemplateRenderer` limits and restarts, `ChatTemplate` control tokens. None knows token ids.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import accumulate
from types import MappingProxyType
from typing import Any, BinaryIO, Self

from ...offload.closing import Closing
from ..settings.errors import PromptError, TemplateError
from .confinement import clean_environment
from .control_tokens import ControlTokens, Marks, Piece, Span, check_text, output_limit
from .messages import TEXT_FIELDS, Message, has_parts, joined_parts, read_messages, texts, with_texts

HEADER_NBYTES = 4


def pack(content: object) -> bytes:
    """A frame of JSON, or of bytes. Raises UnicodeEncodeError if a string in `content` has no UTF-8 form."""
    body = content
    if not isinstance(body, bytes):
        body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    return len(body).to_bytes(HEADER_NBYTES, "big") + body


def read_body(source: BinaryIO) -> bytes | None:
    """The next frame's body from a blocking stream, undecoded; None when the stream has ended."""
    header = source.read(HEADER_NBYTES)
    if len(header) < HEADER_NBYTES:
        return None
    nbytes = int.from_bytes(header, "big")
    body = source.read(nbytes)
    return body if len(body) == nbytes else None


def unpack(body: bytes) -> Any:
    return json.loads(body)


_READ_NBYTES = 1 << 20


class Child:
    """`command` with frames on its stdin and stdout; its stderr is dropped, for it may carry hostile text.

    Deadlines are readings of `time.monotonic()`. Past one, `send` and `receive` raise TimeoutError; a child that is
    gone is an OSError or EOFError. After any of them the child is unusable: `kill` it.
    """

    def __init__(self, command: Sequence[str]) -> None:
        # Its own process group: Ctrl-C on the terminal is the parent's to answer.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            process_group=0,
            env=clean_environment(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._sink = self._process.stdin.fileno()
        self._source = self._process.stdout.fileno()
        os.set_blocking(self._sink, False)
        os.set_blocking(self._source, False)

    def send(self, frame: bytes, deadline: float) -> None:
        unsent = memoryview(frame)
        while unsent:
            _wait(self._sink, select.POLLOUT, deadline)
            unsent = unsent[os.write(self._sink, unsent) :]

    def receive(self, deadline: float, max_nbytes: int) -> bytes:
        """One frame's body. Raises OverflowError before reading a body of more than `max_nbytes`."""
        nbytes = int.from_bytes(self._read(HEADER_NBYTES, deadline), "big")
        if nbytes > max_nbytes:
            raise OverflowError(f"a frame of {nbytes} bytes where at most {max_nbytes} were expected")
        return self._read(nbytes, deadline)

    def _read(self, nbytes: int, deadline: float) -> bytes:
        body = bytearray()
        while len(body) < nbytes:
            _wait(self._source, select.POLLIN, deadline)
            chunk = os.read(self._source, min(nbytes - len(body), _READ_NBYTES))
            if not chunk:
                raise EOFError("the child ended")
            body += chunk
        return bytes(body)

    def kill(self) -> int:
        """Ends the process at once, whatever it is doing, and those that it started; minus the signal that it died of
        where it had ended before."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:
            return self._process.wait()


def _wait(descriptor: int, event: int, deadline: float) -> None:
    # Not select(): it fails for descriptors above 1023, and an engine may hold thousands of files open.
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError("the child did not keep its deadline")


RENDER_LIMIT_S = 2.0
_START_LIMIT_S = 60.0
# -P keeps the current folder, which may be the model's, out of the worker's import path.
_COMMAND = (sys.executable, "-P", "-m", "moedge.runtime.text.template_worker")


class TemplateRenderer(Closing):
    """Renders messages through one chat template, one conversation at a time, each within `limit_s` of wall time.

    The worker starts with the first render and again after each one that had to be killed; starting is not counted.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, Any], now: datetime, limit_s: float = RENDER_LIMIT_S
    ) -> None:
        hello = {"source": source, "special_tokens": special_tokens, "now": now.isoformat(), "alarm_s": limit_s + 1}
        self._hello = pack(hello)
        self._limit_s = limit_s
        self._child: Child | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt's text, generation prompt included. Raises `TemplateError`; the next call starts afresh."""
        frame = pack({"messages": messages, "tools": tools or None, "variables": dict(variables)})
        try:
            reply = self._exchange(self._child or self._start(), frame)
        except TimeoutError:
            raise TemplateError(
                f"The chat template ran for more than {self._limit_s:g} s on one row (1 ms is usual); "
                "use a checkpoint with another template."
            ) from None
        except (EOFError, OSError, OverflowError, ValueError):
            raise TemplateError(
                "The chat template crashed its process; use a checkpoint with another template."
            ) from None
        if "error" in reply:
            raise TemplateError(
                f"The chat template refused the messages with {reply['error']!r}; change the "
                "messages, or use a checkpoint with another template."
            )
        return reply["text"]

    def close(self) -> None:
        """Ends the worker; a later render starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def _exchange(self, child: Child, frame: bytes) -> dict[str, str]:
        # Without an answer, interrupted ones included, the child is ended: a late reply must not reach another row.
        self._child = None
        deadline = time.monotonic() + self._limit_s
        try:
            child.send(frame, deadline)
            # JSON may write one control character in six bytes.
            reply = _checked(unpack(child.receive(deadline, 6 * output_limit(len(frame)) + 4096)))
        except BaseException:
            child.kill()
            raise
        self._child = child
        return reply

    def _start(self) -> Child:
        child = Child(_COMMAND)
        deadline = time.monotonic() + _START_LIMIT_S
        try:
            child.send(self._hello, deadline)
            child.receive(deadline, max_nbytes=64)
        except (EOFError, OSError) as error:
            child.kill()
            raise RuntimeError(
                f"The chat template's process did not start; run `{' '.join(_COMMAND)} < /dev/null` to see why."
            ) from error
        return child


def _checked(reply: Any) -> dict[str, str]:
    # The sender may be under the template's control.
    if not isinstance(reply, dict) or not isinstance(reply.get("text", reply.get("error")), str):
        raise ValueError("the worker's reply has neither text nor error")
    return reply


_PROBE = "a word no template has: Zvqxj"


class ChatTemplate:
    """The chat template `source`, in which only the template itself can write control tokens.

    A template that deletes characters inside a text, or changes their case, can still assemble a control token from
    harmless text; none of the supported families does.
    """

    def __init__(self, source: str, special_tokens: dict[str, Any], controls: ControlTokens, now: datetime) -> None:
        self._source = source
        self._special_tokens = special_tokens
        self._controls = controls
        self._renderer = TemplateRenderer(source, special_tokens, now)
        self._takes_parts: bool | None = None

    def dated(self, now: datetime) -> Self:
        """The same with another date, rendered in a process of its own."""
        return type(self)(self._source, self._special_tokens, self._controls, now)

    def pieces(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Piece]:
        """The prompt for the next answer, cut where text imitates control tokens. Raises `PromptError`."""
        chat = read_messages(messages)
        check_text("".join(texts(chat)), "the conversation")
        if tools and not self.reads("tools"):
            raise PromptError("The model's chat template takes no tools; remove tools from the row.")
        self._refuse_controls(tools, "tools")
        self._refuse_controls(variables, "chat_template_kwargs")
        for message in chat:
            beside = {name: value for name, value in message.items() if name not in TEXT_FIELDS}
            self._refuse_controls(beside, "messages", special_only=message["role"] == "assistant")
        if has_parts(chat) and not self._accepts_parts():
            chat = joined_parts(chat)
        contents = texts(chat)
        spans = list(_foreign(self._controls.spans("".join(contents)), chat))
        if not spans:
            return [Piece(self._render(chat, tools, variables), literal=False)]
        marks = Marks(contents, spans, avoid=self._source)
        return list(marks.pieces(self._render(with_texts(chat, marks.texts), tools, variables)))

    def reads(self, name: str) -> bool:
        """Whether the template's source has the name of a variable."""
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None

    @property
    def writes_json_calls(self) -> bool:
        """Whether calls of functions are `<tool_call>` and JSON, not one of the forms that have tags inside."""
        return "<tool_call>" in self._source and not any(tag in self._source for tag in ("<function", "<arg_key>"))

    def close(self) -> None:
        """Ends the template's process."""
        self._renderer.close()

    def _render(
        self, chat: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        # gpt-oss has another name for the reasoning.
        named = [
            {**each, "thinking": each["reasoning_content"]} if "reasoning_content" in each else each for each in chat
        ]
        text = self._renderer.render(named, tools, variables)
        check_text(text, "the rendered prompt")
        return text

    def _refuse_controls(self, value: Any, where: str, special_only: bool = False) -> None:
        """Raises `PromptError` for values that templates write as JSON or compare, so that marks cannot be in them."""
        text = "\n".join(strings(value))
        for span in self._controls.spans(text) if text else ():
            if span.special or not special_only:
                found = text[span.start : span.stop]
                raise PromptError(f"{where} has the control token {found[:64]!r} as text; remove it.")

    def _accepts_parts(self) -> bool:
        # Templates for plain texts print a list of parts as Python would; the probe shows it, the source does not.
        if self._takes_parts is None:
            content = [{"type": "text", "text": _PROBE}]
            try:
                prompt = self._renderer.render([{"role": "user", "content": content}])
            except TemplateError:
                prompt = ""
            self._takes_parts = _PROBE in prompt and "'type'" not in prompt and '"type"' not in prompt
        return self._takes_parts


def strings(value: Any) -> Iterator[str]:
    """Every string of a JSON value, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def _foreign(spans: Sequence[Span], chat: Sequence[Message]) -> Iterator[Span]:
    """The spans that the model did not write.

    Tokens that are not special, such as `<think>`, are part of the text of an answer: they come back with it in the
    assistant's turns, where templates look for them.
    """
    ends = list(accumulate(sum(map(len, texts([message]))) for message in chat))
    for span in spans:
        turn = bisect_right(ends, span.start)
        whole = span.stop <= ends[turn]
        if span.special or not whole or chat[turn]["role"] != "assistant":
            yield span
