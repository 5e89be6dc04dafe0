"""`moedge eval`: tasks of lm-eval, answered within budgets."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import options
from .options.paths import own_file

# The layout of what `--json` writes (docs/schemas).
SCHEMA = "moedge.eval/1"
# Requests that a document of a multiple choice task usually makes: what is planned for.
_CHOICES = 4

TASKS = Annotated[str, typer.Option("--tasks", metavar="NAME,NAME", help="Tasks or groups of lm-eval; * matches any.")]
INCLUDE = Annotated[
    Path | None,
    typer.Option(
        "--include-path",
        exists=True,
        file_okay=False,
        help="A folder with further tasks (YAML); the code that they name is run.",
    ),
]
LIMIT = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first documents of each task.")]
FEWSHOT = Annotated[int | None, typer.Option("--num-fewshot", min=0, help="Examples before each question.")]
TEMPLATE = Annotated[
    bool, typer.Option("--apply-chat-template", help="Prompts go through the model's chat template, as messages.")
]
LENGTH = Annotated[
    int | None, typer.Option("--max-model-len", min=3, help="Most tokens of a sequence; 4096 if the context allows.")
]
JSON = Annotated[Path | None, typer.Option("--json", callback=own_file, help="Write lm-eval's results to this file.")]


def evaluate(
    model: options.MODEL,
    tasks: TASKS,
    include_path: INCLUDE = None,
    limit: LIMIT = None,
    num_fewshot: FEWSHOT = None,
    apply_chat_template: TEMPLATE = False,
    max_model_len: LENGTH = None,
    dtype: options.DTYPE = options.DType.AUTO,
    quant: options.QUANT = options.Quant.AUTO,
    compute: options.COMPUTE = options.Arithmetic.AUTO,
    kv: options.KV_FORMAT = options.KV.AUTO,
    tokens_per_pass: options.TOKENS_PER_PASS = None,
    max_sequences: options.MAX_SEQUENCES = None,
    deterministic: options.DETERMINISTIC = False,
    attention: options.ATTENTION = options.Attention.AUTO,
    stream: options.STREAM = options.Stream.AUTO,
    seed: options.SEED = 0,
    ram: options.RAM = "auto",
    gpu_mem: options.GPU_MEM = "auto",
    disk: options.DISK = "auto",
    disk_dir: options.DISK_DIR = None,
    as_json: JSON = None,
) -> None:
    """Evaluate a model on tasks of lm-eval (extra `eval`).

    Every request of a task runs in one batch, within the budgets. lm-eval downloads data that is not here.
    """
    from ..runtime.settings.errors import MissingExtra

    if find_spec("lm_eval") is None:
        raise MissingExtra("evaluation needs lm-eval", "eval")
    options.say_device(gpu_mem)
    _evaluate(locals())


def _evaluate(given: Mapping[str, Any]) -> None:
    """`given` are the arguments of the command, by name."""
    from rich.console import Console

    from ..runtime.evaluation.task_names import refuse_unknown_tasks
    from ..runtime.settings.stages import stage, watching
    from ..runtime.source.model_source import open_source
    from .views.progress import stages_on

    tasks = [each.strip() for each in given["tasks"].split(",") if each.strip()]
    with watching(stages_on(Console(stderr=True, highlight=False))):
        with open_source(given["model"]):
            # A model that is refused is refused before torch is imported.
            pass
        with stage("looking for the tasks"):
            refuse_unknown_tasks(tasks, given["include_path"])
        with stage("importing torch and lm-eval"):
            from lm_eval.utils import make_table

            from ..runtime.api.llm import LLM
            from ..runtime.api.options import LLMOptions
            from ..runtime.evaluation.harness import MoedgeLM, evaluate, task_manager

            manager = task_manager(tasks, given["include_path"])
        loading = {name: given[name] for name in LLMOptions.__annotations__ if name in given}
        if given["limit"] is not None:
            loading["rows"] = _CHOICES * given["limit"] * len(tasks)
        with LLM(given["model"], **loading) as llm:
            asked = {name: given[name] for name in ("limit", "num_fewshot", "apply_chat_template")}
            found = evaluate(MoedgeLM(llm), tasks, manager, **asked)
    print(make_table(found))
    if found.get("groups"):
        print(make_table(found, "groups"))
    if given["as_json"] is not None:
        given["as_json"].write_text(results_json(found))


def results_json(found: Mapping[str, Any]) -> str:
    """The text of `--json FILE`: lm-eval's results, and the layout by which the next run knows the file to replace.

    What JSON has no word for becomes text, and a number that is not finite null.
    """
    return json.dumps(_plain({"schema": SCHEMA, **found}), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, bool | int | str | None) else str(value)
