"""A moedge.toml to begin with, as text: comments are the point of it, and TOML writers keep none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from textwrap import wrap
from typing import Any

from ...runtime.settings.option import Option
from ...runtime.shape.shards import FORMATS, KEPT

_MIB = 1 << 20
_BUDGETS = {"host": ("ram", "RAM"), "device": ("gpu-mem", "GPU memory")}
_HEAD = """# Settings of moedge: docs/reference.md. A key is an option without its dashes; remove the # to set it.
# `moedge config show` prints what counts, and `moedge plan MODEL --save plan.json` with
# `moedge config init --from-plan plan.json` writes this file for a machine and a model.
"""
_TABLES = """
# Only for one command.
# [batch]
# max-tokens = 1024

# Overrides everything above, with --profile night or MOEDGE_PROFILE=night.
# [profile.night]
# ram = "90%"

# Counts on the machine with this host name, before all but a profile.
# [machine.workstation]
# gpu-mem = "11GiB"
"""


def config_template(options: Iterable[Option], plan: Mapping[str, Any] | None, host: str | None) -> str:
    """The keys of `options` as comments; with the document of a `plan`, its budgets and formats, in the
    table of machine `host` where one is given."""
    lines = _declared(options) if plan is None else _planned(plan, host)
    return "".join(f"{line}\n" for line in lines)


def _declared(options: Iterable[Option]) -> Iterator[str]:
    """The keys with what they mean, and values that they may have."""
    yield from _HEAD.splitlines()
    for option in options:
        if option.file_key:
            yield from ("", *wrap(option.help, 118, initial_indent="# ", subsequent_indent="# "))
            yield f"# {option.file_key} = {option.example or json.dumps(option.default)}"
    yield from _TABLES.splitlines()


def _planned(plan: Mapping[str, Any], host: str | None) -> Iterator[str]:
    model, machine, chosen = plan["model"], plan["machine"]["hardware"], plan["plan"]
    gpus = "".join(f", {gpu['name']}" for gpu in machine["gpus"])
    yield f"# From a plan for {json.dumps(model['name'])}: {plan['prediction']['generated_tok_s']:,.1f} tok/s expected."
    yield f"# Made for {machine['cpu']}, {machine['cores']} cores, {machine['ram_nbytes'] / 2**30:.1f} GiB{gpus}."
    yield "# docs/reference.md says what else may stand here."
    if host is not None:
        yield ""
        yield "# Counts on this machine only; other machines that share the file have tables of their own."
        yield f"[machine.{json.dumps(host)}]"
    yield ""
    yield "# Budgets, never exceeded. The comments say what the plan uses of each."
    for tier in plan["tiers"]:
        used = sum(tier["parts"].values())
        if tier["tier"] == "disk":
            # It bounds the prepared weights of all models together, so it is for a person to set.
            yield f'# disk = "{-(-used // _MIB)}MiB"  # all prepared weights together; this plan writes as much'
            continue
        key, name = _BUDGETS[tier["tier"]]
        yield f'{key} = "{tier["budget"] // _MIB}MiB"  # {name}: {used / 2**30:.2f} GiB'
    yield ""
    yield "# Formats of weights and KV cache: pinned, so that answers do not change with free memory."
    # The option has one name for all formats in which a checkpoint's own codes are kept.
    yield f'quant = "{chosen["quant"] if chosen["quant"] in FORMATS else KEPT}"'
    yield f'kv = "{chosen["kv"]}"'
    yield f'dtype = "{chosen["dtype"]}"'
    yield ""
    yield "# Chosen from the job and the memory for every run; set them to pin them."
    yield f"# max-sequences = {chosen['max_sequences']}"
    yield f"# tokens-per-pass = {chosen['tokens_per_pass']}"
