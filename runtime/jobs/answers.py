"""Rows out: one line of ASCII JSON per row, in the form that the row was asked in.

A line is a function of the row, its completions, the model's name and the job's start; nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .completion import Completion
from .openai_answers import openai_answer, openai_failure
from .rows import BadRow, Row, RowError
from .short_answers import short_answer, short_failure


class Answers:
    def __init__(self, model: str, created: int) -> None:
        """`model` is the name that answers carry, `created` the job's start in seconds since 1970."""
        self._model = model
        self._created = created

    def answer(self, row: Row, completions: Sequence[Completion]) -> str:
        """`completions` in the order of `row.choices()`, one for each."""
        wanted = len(row.prompts) * row.num_samples
        if len(completions) != wanted:
            raise ValueError(f"row {row.id!r} has {wanted} choices, found {len(completions)} completions")
        if row.short:
            return _dump(short_answer(row, completions))
        return _dump(openai_answer(row, completions, self._model, self._created))

    def failure(self, row: Row | BadRow, error: RowError) -> str:
        return _dump((short_failure if row.short else openai_failure)(row.id, error))


def _dump(answer: dict[str, Any]) -> str:
    return _ENCODER.encode(answer)


# ASCII, because readers that split lines the Unicode way would cut an answer at U+2028.
_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))
