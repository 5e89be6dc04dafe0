"""`moedge run`: one prompt, answered on stdout as it is generated."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import options

if TYPE_CHECKING:
    from ..runtime.settings.budgets import Budgets
    from ..runtime.settings.settings import Settings


def run(
    model: options.MODEL,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; read from stdin if absent.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    dtype: options.DTYPE = options.DType.AUTO,
    quant: options.QUANT = options.Quant.AUTO,
    kv: options.KV_FORMAT = options.KV.AUTO,
    deterministic: options.DETERMINISTIC = False,
    attention: options.ATTENTION = options.Attention.AUTO,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            envvar="MOEDGE_MAX_TOKENS",
            show_envvar=False,
            min=1,
            help="Most tokens to generate; 512 by default if the context allows.",
        ),
    ] = None,
    temperature: options.TEMPERATURE = None,
    seed: options.SEED = 0,
    reasoning_effort: options.REASONING_EFFORT = None,
    max_thinking_tokens: options.MAX_THINKING_TOKENS = None,
    chat_template_kwargs: options.CHAT_TEMPLATE_KWARGS = None,
    ram: options.RAM = "auto",
    gpu_mem: options.GPU_MEM = "auto",
    disk: options.DISK = "auto",
    disk_dir: options.DISK_DIR = None,
) -> None:
    """Answer one prompt on the terminal.

    The answer goes to stdout as it is generated. A model without a chat template continues the text.
    """
    from ..runtime.settings.errors import PromptError
    from ..runtime.settings.settings import Settings

    if prompt is None:
        if sys.stdin.isatty():
            typer.echo("Type the prompt, then Ctrl-D:", err=True)
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise PromptError("the prompt is empty; give some text as an argument or on stdin")
    settings = Settings(
        dtype=dtype, quant=quant, kv=kv, max_sequences=1, deterministic=deterministic, attention=attention
    )
    variables = json.loads(chat_template_kwargs or "{}")
    if reasoning_effort is not None:
        variables["reasoning_effort"] = str(reasoning_effort)
    asked = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "raw": raw,
        "max_thinking_tokens": max_thinking_tokens,
        "variables": variables,
    }
    _print_answer(model, prompt, settings, options.budgets(ram, gpu_mem, disk, disk_dir), asked)


def _print_answer(model: str, prompt: str, settings: Settings, budgets: Budgets, asked: Mapping[str, Any]) -> None:
    """`asked` are the fields of PromptOptions."""
    options.say_device(budgets.gpu_mem)
    from rich.console import Console

    from ..runtime.settings.formatting import escape_controls
    from ..runtime.settings.stages import stage, watching
    from ..runtime.source.model_source import open_source
    from .views.progress import stages_on

    with watching(stages_on(Console(stderr=True, highlight=False))):
        with open_source(model):
            # A model that is refused is refused before torch is imported.
            pass
        with stage("importing torch"):
            from ..runtime.api.single_prompt import PromptOptions, answer
        for piece in answer(model, prompt, settings, budgets, PromptOptions(**asked)):
            print(escape_controls(piece), end="", flush=True)
    print()
