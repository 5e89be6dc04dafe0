"""`moedge eval`: tasks of lm-eval, answered within budgets."""

import json
import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Unpack, cast

import typer

from ...cli.face import MODEL, command, say_device
from ...face import option, options

# The layout of what `--json` writes (docs/schemas).
SCHEMA = "moedge.eval/1"
# Requests that a document of a multiple choice task usually makes: what is planned for.
_CHOICES = 4

INCLUDE = Annotated[
    Path | None,
    typer.Option(
        "--include-path",
        exists=True,
        file_okay=False,
        help="A folder with further tasks (YAML); the code that they name is run.",
    ),
]


class EvalCommand(options.EngineOptions, options.StreamingOptions, options.SeedOptions, total=False):
    """The options of `moedge eval`."""

    tasks: Annotated[
        str, option.Option("Tasks or groups of lm-eval; * matches any.", ..., metavar="NAME,NAME", common=True)
    ]
    limit: Annotated[int | None, option.Option("Only the first documents of each task.", low=1, common=True)]
    num_fewshot: Annotated[int | None, option.Option("Examples before each question.", low=0, common=True)]
    apply_chat_template: Annotated[
        bool, option.Option("Prompts go through the model's chat template, as messages.", False, common=True)
    ]
    max_model_len: Annotated[
        int | None, option.Option("Most tokens of a sequence; 4096 if the context allows.", low=3, common=True)
    ]
    as_json: Annotated[
        Path | None,
        option.Option(
            "Write lm-eval's results to this file.", flags=("--json",), takes=option.Takes.OWN_FILE, common=True
        ),
    ]
    log_samples: Annotated[
        Path | None,
        option.Option(
            "Write prompts, answers and scores here: samples_TASK.jsonl of each task.",
            takes=option.Takes.FOLDER,
            metavar="FOLDER",
            common=True,
        ),
    ]


@command(EvalCommand)
def evaluate(model: MODEL, include_path: INCLUDE = None, **given: Unpack[EvalCommand]) -> None:
    """Evaluate a model on tasks of lm-eval (extra `eval`).

    Every request of a task runs in one batch, within the budgets. lm-eval downloads data that is not here.
    """
    from ...face import errors

    if find_spec("lm_eval") is None:
        raise errors.MissingExtra("evaluation needs lm-eval", "eval")
    say_device(given["gpu_mem"])
    _evaluate(model, include_path, given)


def _evaluate(model: str, include_path: Path | None, given: EvalCommand) -> None:
    from rich.console import Console

    from ...cli.face import stages_on
    from ...face import open_source, stage, watching
    from .task_names import refuse_unknown_tasks

    tasks = [each.strip() for each in given["tasks"].split(",") if each.strip()]
    with watching(stages_on(Console(stderr=True, highlight=False))):
        with open_source(model):
            # A model that is refused is refused before torch is imported.
            pass
        with stage("looking for the tasks"):
            refuse_unknown_tasks(tasks, include_path)
        with stage("importing torch and lm-eval"):
            from lm_eval.utils import make_table

            from ... import LLM
            from .harness import MoedgeLM, evaluate, task_manager

            manager = task_manager(tasks, include_path)
        loading = cast(
            options.LLMOptions,
            {name: value for name, value in given.items() if name in options.LLMOptions.__annotations__},
        )
        if given["limit"] is not None:
            loading["rows"] = _CHOICES * given["limit"] * len(tasks)
        with LLM(model, **loading) as llm:
            found = evaluate(
                MoedgeLM(llm),
                tasks,
                manager,
                limit=given["limit"],
                num_fewshot=given["num_fewshot"],
                apply_chat_template=given["apply_chat_template"],
                log_samples=given["log_samples"] is not None,
            )
    samples = found.pop("samples", {})
    print(make_table(found))
    if found.get("groups"):
        print(make_table(found, "groups"))
    if given["as_json"] is not None:
        given["as_json"].write_text(results_json(found))
    if given["log_samples"] is not None:
        write_samples(given["log_samples"], samples)


def write_samples(folder: Path, samples: Mapping[str, Any]) -> None:
    """What lm-eval keeps of each document, by task: a line of JSON of its fields (`doc`, `arguments`, `resps`, ...)."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, each in samples.items():
        lines = (json.dumps(_plain(one), ensure_ascii=False, allow_nan=False) + "\n" for one in each)
        (folder / f"samples_{task}.jsonl").write_text("".join(lines), encoding="utf-8")


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
