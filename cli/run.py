"""`moedge run`: one prompt, answered on stdout as it is generated."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from .options import options


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
    from ..runtime.api.single_prompt import PromptOptions, answer
    from ..runtime.settings.errors import PromptError
    from ..runtime.settings.formatting import escape_controls
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
    budgets = options.budgets(ram, gpu_mem, disk, disk_dir)
    variables = json.loads(chat_template_kwargs or "{}")
    if reasoning_effort is not None:
        variables["reasoning_effort"] = str(reasoning_effort)
    asked = PromptOptions(max_tokens, temperature, seed, raw, max_thinking_tokens, variables)
    for piece in answer(model, prompt, settings, budgets, asked):
        print(escape_controls(piece), end="", flush=True)
    print()
