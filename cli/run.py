"""`moedge run`: one prompt, answered on stdout as it is generated."""

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Unpack

import typer

from ..runtime.settings.option import Option
from ..runtime.settings.options import AnswerLength, BudgetOptions, ComputeOptions, SamplingOptions
from .options import options


class RunCommand(BudgetOptions, ComputeOptions, AnswerLength, SamplingOptions, total=False):
    """The options of `moedge run`."""

    raw: Annotated[bool, Option("Continue the text as it is, without the chat template.", False, common=True)]


PROMPT = Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt; read from stdin if absent.")]
_MAX_TOKENS = "Most tokens to generate; 512 by default if the context allows."


@options.command(RunCommand, max_tokens={"default": None, "help": _MAX_TOKENS})
def run(model: options.MODEL, prompt: PROMPT = None, **given: Unpack[RunCommand]) -> None:
    """Answer one prompt on the terminal.

    The answer goes to stdout as it is generated. A model without a chat template continues the text.
    """
    from ..runtime.settings.errors import PromptError

    if prompt is None:
        if sys.stdin.isatty():
            typer.echo("Type the prompt, then Ctrl-D:", err=True)
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise PromptError("the prompt is empty; give some text as an argument or on stdin")
    variables = json.loads(str(given["chat_template_kwargs"] or "{}"))
    if given["reasoning_effort"] is not None:
        variables["reasoning_effort"] = given["reasoning_effort"]
    _print_answer(model, prompt, given, variables)


def _print_answer(model: str, prompt: str, given: RunCommand, variables: Mapping[str, Any]) -> None:
    """`variables` are for the chat template."""
    options.say_device(given["gpu_mem"])
    from rich.console import Console

    from ..formatting import escape_controls
    from ..runtime.jobs.request import budgets_of, settings_of
    from ..runtime.settings.stages import importing, watching
    from ..runtime.source.model_source import open_source
    from .views.progress import stages_on

    with watching(stages_on(Console(stderr=True, highlight=False))):
        with open_source(model):
            # A model that is refused is refused before torch is imported.
            pass
        with importing("torch"):
            from ..generation import PromptOptions, answer
        asked = PromptOptions(
            max_tokens=given["max_tokens"],
            temperature=given["temperature"],
            seed=given["seed"],
            raw=given["raw"],
            max_thinking_tokens=given["max_thinking_tokens"],
            variables=variables,
        )
        settings = settings_of({**given, "max_sequences": 1})
        for piece in answer(model, prompt, settings, budgets_of(given), asked):
            print(escape_controls(piece), end="", flush=True)
    print()
