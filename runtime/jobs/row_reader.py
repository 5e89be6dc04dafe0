"""Rows that come one by one from elsewhere than a file, and their answers: for whoever serves a loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..loading.engine_loader import LoadedModel
from ..rows.answer_formats import openai_answer
from ..rows.failure import RowFailure
from ..rows.row import Defaults, Endpoint, Row
from ..rows.row_formats import RowBuilder, RowPosition
from ..sampling.model_defaults import model_defaults
from .encode import RowEncoder
from .run import OpenRow


class RowReader:
    """Bodies of OpenAI's API to rows, rows to sequences, and finished sequences to answers."""

    def __init__(self, loaded: LoadedModel, model: str, seed: int) -> None:
        """`model` is the name that answers carry, `seed` is for rows that do not say."""
        shape = loaded.source.shape
        self._model = model
        self._longest = loaded.longest
        self._tokenizer = loaded.tokenizer
        self._encoder = RowEncoder(self._tokenizer, shape.vocab, shape.context, self._longest, most=self._longest)
        self._builder = RowBuilder(Defaults(seed=seed, **model_defaults(loaded.source.folder).values))

    def row(self, body: Mapping[str, Any], endpoint: Endpoint, row_id: str) -> Row:
        """Raises InvalidRow."""
        return self._builder.build(body, endpoint, RowPosition(0, 1, row_id))

    def open(self, row: Row, most: int | None = None) -> OpenRow | RowFailure:
        """The row's sequences, for an engine; one thread at a time. Raises TokenizerError.

        With `most`, answers may have so many tokens, as far as they fit, where the row's max_tokens are fewer.
        """
        choices = self._encoder.encode(row)
        if isinstance(choices, RowFailure):
            return choices
        if most is not None:
            left = self._longest - max(len(token_ids) for token_ids, _ in choices)
            most = max(row.params.max_tokens, min(most, left))
            choices = [(token_ids, replace(params, max_tokens=most)) for token_ids, params in choices]
        return OpenRow.start(row, choices, self._encoder)

    def answer(self, opened: OpenRow, created: int) -> dict[str, Any] | RowFailure:
        """The body of OpenAI's response once all sequences are finished; `created` is the second since 1970."""
        completions = opened.completions()
        if isinstance(completions, RowFailure):
            return completions
        answer = openai_answer(opened.row, completions, self._model, created, self._tokenizer.token_text)
        body: dict[str, Any] = answer["response"]["body"]
        body["usage"]["prompt_tokens_details"] = {"cached_tokens": opened.cached_tokens}
        return body
