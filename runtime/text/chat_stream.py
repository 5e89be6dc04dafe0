"""A chat answer split, token by token, into reasoning, content and calls of functions.

How a model marks the parts is found in its added tokens and its chat template: a pair of marks around the reasoning
(`<think>`), or the channels of gpt-oss (https://github.com/openai/harmony). Marks are recognized by their token ids,
because special tokens leave no text; only a mark that no added token spells is looked for in the text. Everything here
is a function of the prompt and the tokens, so an answer does not depend on the batch.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from tokenizers import Tokenizer

from .messages import FunctionCall
from .stream import Decoding, TextStream

# (beginning, end, what the model writes first): families that have a mark of their own.
_PAIRS = (
    ("<think>", "</think>", ""),
    ("<seed:think>", "</seed:think>", ""),
    ("[THINK]", "[/THINK]", ""),
    ("<|channel>", "<channel|>", "thought"),
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),
    ("<|inner_prefix|>", "<|inner_suffix|>", ""),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7", ""),
    ("<thinking>", "</thinking>", ""),
    ("<thought>", "</thought>", ""),
    ("<reasoning>", "</reasoning>", ""),
)
_NAMED = re.compile(r"<(\w+:think)>")
_HARMONY = ("start", "end", "message", "channel", "constrain", "return", "call")
# Tokens at the end of a prompt in which a mark is looked for: templates write at most a newline after it.
_TAIL = 16


@dataclass(frozen=True, slots=True)
class ThinkMarks:
    """A pair of marks; an id is None where no added token spells the mark.

    `label` is what the model writes first inside, `closing_ids` end the reasoning as the template ends it.
    """

    begin: str
    end: str
    label: str
    begin_id: int | None
    end_id: int | None
    closing_ids: tuple[int, ...]

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens beside the model's own that end an answer."""
        return frozenset()


@dataclass(frozen=True, slots=True)
class Harmony:
    """The channels of gpt-oss: `ids` of the marks by name, and the words that are forced between them."""

    ids: Mapping[str, int]
    assistant: tuple[int, ...]
    final: tuple[int, ...]

    @property
    def opening_ids(self) -> tuple[int, ...]:
        """From the beginning of an answer to its content."""
        return (self.ids["channel"], *self.final, self.ids["message"])

    @property
    def closing_ids(self) -> tuple[int, ...]:
        """From the middle of the reasoning to the content."""
        return (self.ids["end"], self.ids["start"], *self.assistant, *self.opening_ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset(self.ids[name] for name in ("return", "call") if name in self.ids)


AnswerFormat = ThinkMarks | Harmony


def find_format(backend: Tokenizer, template: str, encode: Callable[[str], list[int]]) -> AnswerFormat | None:
    """How the model marks the parts of its answers; None where no mark is known.

    `encode` turns text from the middle of an answer, marks included, into token ids.
    """
    added = {token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()}
    ids = {name: added[f"<|{name}|>"] for name in _HARMONY if f"<|{name}|>" in added}
    if all(name in ids for name in ("start", "end", "message", "channel")) and "<|channel|>" in template:
        return Harmony(ids, tuple(encode("assistant")), tuple(encode("final")))
    named = [(f"<{name}>", f"</{name}>", "") for name in _NAMED.findall(" ".join(added) + template)]
    pairs = [*_PAIRS, *named]
    # Vocabularies hold marks of families that the template does not use.
    for used in (True, False):
        for begin, end, label in pairs:
            if begin in added and end in added and (not used or end in template):
                return _marks(begin, end, label, added, template, encode)
    for begin, end, label in pairs:
        if begin in template and end in template:
            return _marks(begin, end, label, {}, template, encode)
    return None


def _marks(
    begin: str, end: str, label: str, added: Mapping[str, int], template: str, encode: Callable[[str], list[int]]
) -> ThinkMarks:
    closing = tuple(encode(_closing(template, end)))
    return ThinkMarks(begin, end, label, added.get(begin), added.get(end), closing)


def _closing(template: str, end: str) -> str:
    """The end mark with the newlines that the template's string literals have around it."""
    around = re.findall(rf"((?:\\n)*){re.escape(end)}((?:\\n)*)", template)
    before = "\n" if any(newlines for newlines, _ in around) else ""
    after = max((len(newlines) // 2 for _, newlines in around), default=0)
    return before + end + "\n" * after


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """`max_thinking_tokens`: None sets no bound; `min_tokens` come before a stop string is looked for."""

    stops: Sequence[str] = ()
    min_tokens: int = 0
    max_thinking_tokens: int | None = None


class _Parts:
    """The reasoning and the content of an answer, and the tokens that are forced."""

    def __init__(self, decoding: Decoding, options: StreamOptions) -> None:
        self.decoding = decoding
        self.options = options
        self.num_tokens = 0
        self.num_inside = 0
        self.queue: deque[int] = deque()
        self.forcing = False
        self.thoughts: TextStream | None = None
        self.content = self.new_content()
        self._shown = False

    def new_content(self) -> TextStream:
        """Behind reasoning the newlines that templates write there are no content."""
        left = max(0, self.options.min_tokens - self.num_tokens)
        detokenizer, stops = self.decoding.detokenizer(), self.options.stops
        return TextStream(detokenizer, stops, min_tokens=left, drop_newlines=self.thoughts is not None)

    def count(self) -> None:
        """A token came; it is the first of those that were forced, if any are."""
        self.num_tokens += 1
        if self.queue:
            self.queue.popleft()

    def force(self, token_ids: Sequence[int]) -> None:
        """Once per answer."""
        if not self.forcing:
            self.forcing = True
            self.queue.extend(token_ids)

    @property
    def over_limit(self) -> bool:
        limit = self.options.max_thinking_tokens
        return limit is not None and self.num_inside >= limit

    def take_parts(self) -> tuple[str, str]:
        return self.thoughts.take() if self.thoughts is not None else "", self.content.take()

    def take(self) -> str:
        thoughts, content = self.take_parts()
        if self.thoughts is not None and content and not self._shown:
            self._shown = True
            return f"{thoughts}\n\n{content}"
        return thoughts + content


class _Part(Enum):
    START = auto()
    REASONING = auto()
    CONTENT = auto()


class ThinkStream:
    """An answer whose reasoning is between a pair of marks, of which the prompt may have the first.

    Reasoning comes before the content or not at all: a mark behind other text belongs to the text. Where an answer is
    not `masked` a grammar does not apply yet; `begin_id` may come although a grammar forbids it; `forced` is the token
    that must come next, if it is not None.
    """

    def __init__(
        self, marks: ThinkMarks, decoding: Decoding, prompt_ids: Sequence[int], options: StreamOptions
    ) -> None:
        self.stopped = False
        self.reasoning_tokens = 0
        self.calls: Sequence[FunctionCall] = ()
        self._marks = marks
        self._parts = _Parts(decoding, options)
        self._part = _Part.START
        match _end_of_prompt(marks, decoding, prompt_ids):
            case _Part.REASONING:
                self._begin_reasoning()
            case _Part.CONTENT:
                self._part = _Part.CONTENT

    @property
    def masked(self) -> bool:
        return self._part is not _Part.REASONING and not self._parts.queue

    @property
    def begin_id(self) -> int | None:
        return self._marks.begin_id if self._part is _Part.START else None

    @property
    def forced(self) -> int | None:
        return self._parts.queue[0] if self._parts.queue else None

    @property
    def text(self) -> str:
        """The content so far, without reasoning."""
        return self._parts.content.text

    @property
    def reasoning(self) -> str | None:
        """None where the model did not reason."""
        thoughts = self._parts.thoughts
        if thoughts is None:
            return None
        text = thoughts.text
        if self._marks.label:
            text = text.lstrip().removeprefix(self._marks.label)
        return text.strip("\n")

    @property
    def answered(self) -> bool:
        """Whether the content has begun."""
        return self._part is not _Part.REASONING

    def append(self, token_id: int) -> None:
        parts = self._parts
        parts.count()
        if self._part is _Part.START:
            self._start(token_id)
        elif self._part is _Part.REASONING:
            self._reason(token_id)
        else:
            parts.content.append(token_id)
        self.stopped = self._part is not _Part.REASONING and parts.content.stopped

    def finish(self) -> None:
        """No token follows."""
        self._part = _Part.CONTENT if self._part is _Part.START else self._part
        self._parts.content.finish()
        if self._parts.thoughts is not None:
            self._parts.thoughts.finish()

    def take(self) -> str:
        """What may be shown and was not taken: the reasoning, an empty line, the content."""
        # What comes first may still turn out to be a mark.
        return "" if self._part is _Part.START else self._parts.take()

    def take_parts(self) -> tuple[str, str]:
        """The same as reasoning and content."""
        return ("", "") if self._part is _Part.START else self._parts.take_parts()

    def _start(self, token_id: int) -> None:
        if token_id == self._marks.begin_id:
            self._begin_reasoning()
            return
        self._parts.content.append(token_id)
        text = self._parts.content.text.lstrip()
        begin = self._marks.begin
        if self._marks.begin_id is None and text.startswith(begin):
            self._begin_reasoning(text.removeprefix(begin))
        elif text and (self._marks.begin_id is not None or not begin.startswith(text)):
            self._part = _Part.CONTENT

    def _begin_reasoning(self, text: str = "") -> None:
        parts = self._parts
        stops = (self._marks.end,) if self._marks.end_id is None else ()
        self._part, parts.thoughts = _Part.REASONING, TextStream(parts.decoding.detokenizer(), stops)
        self.reasoning_tokens = parts.num_tokens
        parts.thoughts.add(text)
        self._bound()

    def _reason(self, token_id: int) -> None:
        parts = self._parts
        assert parts.thoughts is not None
        self.reasoning_tokens = parts.num_tokens
        parts.num_inside += 1
        if token_id == self._marks.end_id:
            self._begin_content()
            return
        parts.thoughts.append(token_id)
        if parts.thoughts.stopped:
            self._begin_content(parts.thoughts.after.removeprefix(self._marks.end))
        else:
            self._bound()

    def _begin_content(self, text: str = "") -> None:
        self._part = _Part.CONTENT
        self._parts.content = self._parts.new_content()
        self._parts.content.add(text)

    def _bound(self) -> None:
        if self._parts.over_limit:
            self._parts.force(self._marks.closing_ids)


def _end_of_prompt(marks: ThinkMarks, decoding: Decoding, prompt_ids: Sequence[int]) -> _Part:
    """Where the prompt leaves the answer: inside reasoning, behind it, or before the question."""
    tail = prompt_ids[-_TAIL:]
    if marks.begin_id is not None and marks.begin_id not in tail and marks.end_id not in tail:
        return _Part.START
    text = b"".join(map(decoding.data, tail)).decode(errors="replace").rstrip()
    if text.endswith(marks.end):
        return _Part.CONTENT
    inside = text.removesuffix(marks.label).rstrip() if marks.label else text
    return _Part.REASONING if inside.endswith(marks.begin) else _Part.START


_RECIPIENT = re.compile(r"to=(\S+)")
_FUNCTIONS = "functions."
_FINAL = "final"


class HarmonyStream:
    """An answer in the channels of gpt-oss: `final` is content, calls of functions are calls, the rest is reasoning.

    A message is a header, which names channel and recipient, and a body. The properties are those of ThinkStream.
    """

    def __init__(self, harmony: Harmony, decoding: Decoding, prompt_ids: Sequence[int], options: StreamOptions) -> None:
        self.stopped = False
        self.reasoning_tokens = 0
        self.begin_id: int | None = None
        self._harmony = harmony
        self._names = {token_id: name for name, token_id in harmony.ids.items()}
        self._parts = _Parts(decoding, options)
        self._header: list[str] | None = []
        self._header_tokens = 0
        self._num_given = 0
        self._body: TextStream | None = None
        self._opened = False
        self._calls: list[tuple[str, TextStream]] = []
        self._read_prompt(prompt_ids)
        if options.max_thinking_tokens == 0 and not self._opened:
            self._parts.force(harmony.opening_ids)
        self._bound()

    @property
    def masked(self) -> bool:
        return self._body is self._parts.content and not self._parts.queue

    @property
    def forced(self) -> int | None:
        return self._parts.queue[0] if self._parts.queue else None

    @property
    def text(self) -> str:
        return self._parts.content.text

    @property
    def reasoning(self) -> str | None:
        return None if self._parts.thoughts is None else self._parts.thoughts.text.strip("\n")

    @property
    def answered(self) -> bool:
        return self._body is self._parts.content or self.stopped or not self._opened

    @property
    def calls(self) -> Sequence[FunctionCall]:
        return [FunctionCall(name, body.text) for name, body in self._calls]

    def append(self, token_id: int) -> None:
        self._parts.count()
        inside = self._is_reasoning
        self._read(token_id)
        if inside or self._is_reasoning:
            self.reasoning_tokens += 1
            self._parts.num_inside += inside
        self._bound()
        self.stopped = self.stopped or self._parts.content.stopped

    def finish(self) -> None:
        if not self._opened and self._header:
            # No channel ever began: the text is all there is.
            self._parts.content.add("".join(self._header[self._num_given :]).replace(" \0 ", ""))
        for part in (self._parts.content, self._parts.thoughts, *(body for _, body in self._calls)):
            if part is not None:
                part.finish()

    def take(self) -> str:
        return self._parts.take()

    def take_parts(self) -> tuple[str, str]:
        return self._parts.take_parts()

    @property
    def _is_reasoning(self) -> bool:
        return self._body is not None and self._body is self._parts.thoughts

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        """The header, and perhaps the body, that the prompt begins for the answer."""
        tail = list(prompt_ids[-_TAIL:])
        starts = [index for index, token_id in enumerate(tail) if self._names.get(token_id) == "start"]
        for token_id in tail[starts[-1] :] if starts else ():
            self._read(token_id)
        self._header_tokens = self.reasoning_tokens = 0
        self._num_given = len(self._header or ())

    def _read(self, token_id: int) -> None:
        name = self._names.get(token_id)
        if name in ("start", "channel"):
            self._begin_header(fresh=name == "start")
        elif name in ("end", "call", "return"):
            self.stopped = self.stopped or self._body is self._parts.content
            self._header = self._body = None
        elif name == "message" and self._header is not None:
            self._begin_body("".join(self._header))
        elif self._header is not None:
            self._header_tokens += 1
            self._header.append(" " if name else self._parts.decoding.data(token_id).decode(errors="replace"))
        elif self._body is not None:
            self._body.append(token_id)

    def _begin_header(self, fresh: bool) -> None:
        if fresh or self._header is None:
            self._header, self._header_tokens = [], 0
        if not fresh:
            self._header.append(" \0 ")
        self._body = None
        self._header_tokens += 1

    def _begin_body(self, header: str) -> None:
        """`header` has a NUL where its channel begins."""
        _, _, channel = header.partition("\0")
        recipient = _RECIPIENT.search(header)
        self._header, self._opened = None, True
        if recipient is not None and recipient[1].startswith(_FUNCTIONS):
            self._body = TextStream(self._parts.decoding.detokenizer())
            self._calls.append((recipient[1].removeprefix(_FUNCTIONS), self._body))
        elif channel.split()[:1] == [_FINAL]:
            self._body = self._parts.content = self._parts.new_content()
        else:
            self._begin_thought()

    def _begin_thought(self) -> None:
        thoughts = self._parts.thoughts
        if thoughts is None:
            thoughts = self._parts.thoughts = TextStream(self._parts.decoding.detokenizer())
        else:
            thoughts.add("\n")
        self._body = thoughts
        self.reasoning_tokens += self._header_tokens

    def _bound(self) -> None:
        if self._is_reasoning and self._parts.over_limit:
            self._parts.force(self._harmony.closing_ids)


ChatStream = ThinkStream | HarmonyStream


def open_stream(
    answer_format: AnswerFormat, decoding: Decoding, prompt_ids: Sequence[int], options: StreamOptions
) -> ChatStream:
    """The beginning of the answer to a chat prompt."""
    if isinstance(answer_format, Harmony):
        return HarmonyStream(answer_format, decoding, prompt_ids, options)
    return ThinkStream(answer_format, decoding, prompt_ids, options)
