"""Answers to short rows: the text and what it cost, on one level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .completion import Completion, usage
from .rows import Row, RowError


def short_answer(row: Row, completions: Sequence[Completion]) -> dict[str, Any]:
    """With n above 1 the choices are listed under `choices`, each as the single one would have been."""
    choices = [_choice(row, completion) for completion in completions]
    answer = choices[0] if row.num_samples == 1 else {"choices": choices}
    return {"id": row.id} | answer | {"usage": usage(completions, row.num_samples)}


def short_failure(row_id: str, error: RowError) -> dict[str, Any]:
    return {"id": row_id, "error": {"code": error.code, "message": error.message, "param": error.param}}


def _choice(row: Row, completion: Completion) -> dict[str, Any]:
    choice: dict[str, Any] = {"text": None if completion.cut else completion.text}
    if completion.cut:
        choice["partial"] = completion.text
    choice["finish_reason"] = completion.finish_reason
    if row.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
    return choice
