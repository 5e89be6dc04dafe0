"""A model for Ray Data's `map_batches`: one engine for each actor, whose resources are those of its plan.

Imports no Ray: `map_batches` takes a class and calls it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...face import errors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ... import LLM

    # Columns of a batch by name; `map_batches` gives and takes them.
    Batch = dict[str, NDArray[np.generic]]

# Rows that one call gets: enough that the last, shorter passes of a call cost little.
_FULL_PASSES = 8


class BatchModel:
    """Answers a column of prompts: texts, lists of token ids, or chats (lists of messages).

        dataset.map_batches(BatchModel, **BatchModel.actor_options("Qwen/Qwen3-30B-A3B", ram="24GiB", concurrency=4))

    Every row comes back with `generated_text`, `finish_reason`, `num_generated_tokens` and `error`, which is empty
    unless the row cannot be answered. A row without a seed of its own draws the numbers of its index in its batch.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        column: str = "prompt",
        sampling: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`sampling` are fields of SamplingParams, `options` those of LLM. Raises as LLM does."""
        from ...face import settle

        settle()
        from ... import LLM, SamplingParams

        self._column = column
        self._params = None if sampling is None else SamplingParams(**sampling)
        self._llm: LLM = LLM(model, **(options or {}))

    def __call__(self, batch: Batch) -> Batch:
        """Raises BadArgument for a batch without the column."""
        import numpy as np

        if self._column not in batch:
            raise errors.BadArgument(f"the batch has no column {self._column!r}; it has {', '.join(batch)}")
        outputs = self._llm.answer([_prompt(each) for each in batch[self._column]], self._params)
        found = [each.outputs[0] if each.outputs else None for each in outputs]
        return {
            **batch,
            "generated_text": np.array(["" if each is None else each.text for each in found], dtype=object),
            "finish_reason": np.array(
                ["error" if each is None else each.finish_reason for each in found], dtype=object
            ),
            "num_generated_tokens": np.array([0 if each is None else len(each.token_ids) for each in found]),
            "error": np.array([each.error or "" for each in outputs], dtype=object),
        }

    @staticmethod
    def actor_options(
        model: str | Path,
        *,
        concurrency: int = 1,
        column: str = "prompt",
        sampling: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """The arguments of `map_batches` by the plan of one engine, made here, on a machine like those of the actors.

        Ray reserves for each of `concurrency` actors what the engine may use: memory, a GPU if it computes on one, and
        this machine's CPUs divided by `concurrency`, less one for reading and writing. `options` are those of LLM; say
        `ram` where several actors share a machine. Raises DoesNotFit, BadArgument.
        """
        from ... import plan

        known = {name: value for name, value in options.items() if name not in _NOT_OF_PLANS}
        report = plan(model, **known)
        if report.result is None:
            raise errors.DoesNotFit(str(report.document["reason"]))
        chosen = report.result.plan
        on_gpu = chosen.budget.device is not None
        given = {"column": column, "sampling": sampling, "options": options}
        return {
            "fn_constructor_args": (_resolved(model),),
            "fn_constructor_kwargs": given,
            "concurrency": concurrency,
            "batch_size": _FULL_PASSES * chosen.max_sequences,
            # Reading and writing need a CPU, or the actors would wait for rows that nobody reads.
            "num_cpus": max(0.5, len(os.sched_getaffinity(0)) // concurrency - 1),
            "num_gpus": int(on_gpu),
            "memory": chosen.budget.host_nbytes,
        }


_NOT_OF_PLANS = ("max_model_len", "seed", "stream")


def _resolved(model: str | Path) -> str:
    """Actors have other working folders."""
    return str(Path(model).resolve()) if Path(model).is_dir() else str(model)


def _prompt(value: Any) -> Any:
    """Arrow gives lists as arrays."""
    found = value.tolist() if hasattr(value, "tolist") else value
    return list(found) if isinstance(found, Sequence) and not isinstance(found, str) else found
