"""Partial answers to one: a tree of merges, each of neighbours that fit a prompt together, to any depth.

A tree is a function of the answers: a job that was killed computes the same one again.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .question import Prompts, pages_text
from .rounds import Answer, Entry, RowAnswers
from .schemas import KeyedLists

# Tokens of a prompt: of a conversation where the model has one.
PromptTokens = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a document has no answer."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Missing:
    """Prompts by the ids of their rows: those of the next level that have no answer yet."""

    prompts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Merged:
    """The answer to the whole document, how many levels of merges made it, and the tokens of all rows for it."""

    answer: Answer
    levels: int
    usage: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Part:
    """An answer that covers chunks `first` to `last`, counted from 0."""

    first: int
    last: int
    answer: Answer


class Merger:
    """Merges of one question; a prompt has at most `limit` tokens."""

    def __init__(self, prompts: Prompts, tokens: PromptTokens, limit: int, lists: KeyedLists) -> None:
        """`lists` are left out of prompts that merge, and put together from the answers to all chunks."""
        self._lists = lists
        self._prompts = prompts
        self._tokens = tokens
        self._limit = limit

    def advance(self, entry: Entry, answers: RowAnswers) -> Missing | Merged | Failed | None:
        """What a document lacks, or its answer; None where chunks of it have no answer yet."""
        ids = entry.chunk_ids
        if not all(each in answers for each in ids):
            return None
        parts = [_Part(index, index, answers[each]) for index, each in enumerate(ids)]
        level = 0
        if failed := _first_failure(entry, parts):
            return failed
        usage, chunks = _usage(Counter(), parts), parts
        if self._lists.everything and len(chunks) > 1:
            return Merged(self._with_lists(chunks[0].answer, chunks), 0, usage)
        while len(parts) > 1:
            level += 1
            groups = self._groups(entry, parts)
            if groups is None:
                return Failed("document_merge_too_long", _TOO_LONG)
            missing, parts = self._level(entry, level, groups, answers)
            if missing:
                return Missing(tuple(missing))
            if failed := _first_failure(entry, parts):
                return failed
            usage = _usage(usage, [part for part, group in zip(parts, groups, strict=True) if len(group) > 1])
        answer = self._with_lists(parts[0].answer, chunks) if self._lists and len(chunks) > 1 else parts[0].answer
        return Merged(answer, level, usage)

    def _with_lists(self, answer: Answer, chunks: Sequence[_Part]) -> Answer:
        return replace(answer, text=self._lists.put_together(answer.shown, [each.answer.shown for each in chunks]))

    def _level(
        self, entry: Entry, level: int, groups: Sequence[Sequence[_Part]], answers: RowAnswers
    ) -> tuple[list[tuple[str, str]], list[_Part]]:
        """(rows that have no answer, the parts that the others made). A group of one is passed on as it is."""
        missing, merged = [], []
        for index, group in enumerate(groups):
            if len(group) == 1:
                merged.append(group[0])
                continue
            prompt = self._prompt(entry, group)
            each = entry.merge_id(level, index, prompt)
            if each in answers:
                merged.append(_Part(group[0].first, group[-1].last, answers[each]))
            else:
                missing.append((each, prompt))
        return missing, merged

    def _groups(self, entry: Entry, parts: Sequence[_Part]) -> list[list[_Part]] | None:
        """Neighbours that fit together, as many as possible; None where no two of them do."""
        groups: list[list[_Part]] = []
        for part in parts:
            if groups and self._tokens(self._prompt(entry, [*groups[-1], part])) <= self._limit:
                groups[-1].append(part)
            else:
                groups.append([part])
        return groups if len(groups) < len(parts) else None

    def _prompt(self, entry: Entry, group: Sequence[_Part]) -> str:
        return self._prompts.of_merge(entry.facts, "\n\n".join(self._shown(entry, part) for part in group))

    def _shown(self, entry: Entry, part: _Part) -> str:
        pages = entry.pages(part.first, part.last)
        chunks = pages_text((part.first + 1, part.last + 1))
        where = f"part {chunks}" if pages is None else f"pages {pages_text(pages)}"
        answer = self._lists.without(part.answer.shown) if self._lists else part.answer.shown
        return f"[{where} of {entry.facts['pages'] if pages else len(entry.chunks)}]\n{answer}"


_TOO_LONG = (
    "two of its partial answers do not fit into one prompt; lower --max-tokens, raise --chunk-tokens, or use "
    "--long split"
)


def _usage(before: Mapping[str, int], parts: Iterable[_Part]) -> Mapping[str, int]:
    counts = Counter(before)
    for part in parts:
        counts.update({name: part.answer.usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")})
    return counts


def _first_failure(entry: Entry, parts: Sequence[_Part]) -> Failed | None:
    for part in parts:
        if part.answer.error is not None:
            where = f" (part {part.first + 1} of {len(entry.chunks)})" if len(entry.chunks) > 1 else ""
            return Failed(str(part.answer.error["code"]), f"{part.answer.error['message']}{where}")
    return None
