"""moedge from Python: generates text in bulk with language models that do not fit the machine.

    from moedge import LLM

    with LLM("Qwen/Qwen3-30B-A3B", ram="24GiB") as llm:
        for output in llm.generate(["Once upon a time"]):
            print(output.outputs[0].text)

`LLM` generates in this process, `run_batch` is the job behind `moedge batch`, `plan` is what `moedge plan` says.
docs/python.md is the guide. Importing moedge loads no torch; the first use of `LLM` or `run_batch` does.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .apps.documents.document import Chunk, Document, UnreadDocument, split
    from .apps.documents.iterate import iter_documents
    from .apps.documents.run import run_documents
    from .batch import run_batch
    from .completion import CompletionOutput, Logprob, RequestOutput, SamplingParams
    from .llm import LLM, AsyncLLM
    from .offload.errors import MoedgeError
    from .plan_report import PlanReport, plan
    from .runtime.evaluation.check import CheckReport, check
    from .runtime.rows.answer_formats import ChoiceScores

    __version__: str

_MODULES = {
    "AsyncLLM": ".llm",
    "CheckReport": ".runtime.evaluation.check",
    "ChoiceScores": ".runtime.rows.answer_formats",
    "Chunk": ".apps.documents.document",
    "CompletionOutput": ".completion",
    "Document": ".apps.documents.document",
    "LLM": ".llm",
    "Logprob": ".completion",
    "MoedgeLM": ".apps.evaluation.harness",
    "MoedgeError": ".offload.errors",
    "PlanReport": ".plan_report",
    "RequestOutput": ".completion",
    "SamplingParams": ".completion",
    "UnreadDocument": ".apps.documents.document",
    "check": ".runtime.evaluation.check",
    "iter_documents": ".apps.documents.iterate",
    "plan": ".plan_report",
    "run_batch": ".batch",
    "run_documents": ".apps.documents.run",
    "split": ".apps.documents.document",
}

__all__ = [
    "AsyncLLM",
    "CheckReport",
    "ChoiceScores",
    "Chunk",
    "CompletionOutput",
    "Document",
    "LLM",
    "Logprob",
    "MoedgeError",
    "PlanReport",
    "RequestOutput",
    "SamplingParams",
    "UnreadDocument",
    "__version__",
    "check",
    "iter_documents",
    "plan",
    "run_batch",
    "run_documents",
    "split",
]


def __getattr__(name: str) -> Any:
    """Imports what was asked for, once: torch takes seconds, and `moedge --help` needs none of it."""
    if name == "__version__":
        value: Any = version("moedge")
    elif name in _MODULES:
        from .computing import settle
        from .offload.memory import gc_paused

        # Before torch is loaded, as the command line does: its threads and allocators read the environment once.
        settle()
        try:
            with gc_paused():
                value = getattr(import_module(_MODULES[name], __name__), name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(f"{__name__}.apps."):
                raise
            raise AttributeError(f"moedge.{name} is of the application {error.name}, which is left out here") from None
    else:
        raise AttributeError(f"module 'moedge' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
