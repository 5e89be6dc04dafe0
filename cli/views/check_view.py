"""What `moedge check` prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console

from ...runtime.evaluation.check import PARTING, CheckReport
from ...runtime.settings.formatting import fit, loss_line


def print_check(found: CheckReport) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    width = console.width if sys.stdout.isatty() else None
    for line in lines(found):
        console.print(fit(line, width))


def lines(found: CheckReport) -> Iterator[str]:
    """The report, for people."""
    yield f"{found.model}: weights {found.quant}, dtype {found.dtype}; {found.prompts} prompts, {found.tokens:,} tokens"
    how = "transformers' own loading" if found.reference == "transformers" else "transformers' code, a layer at a time"
    yield f"against {how}, in float32" + (f": {found.why}" if found.why else "")
    yield f"logits   greatest difference {found.max_abs:.1e}, relative {found.max_relative:.1e}"
    yield f"         greatest KL divergence {found.kl:.1e} nats"
    yield f"tokens   {found.greedy_same} of {found.greedy_total} greedy ones are the same"
    greatest = max(range(len(found.layers)), key=lambda index: found.layers[index])
    yield f"layers   greatest relative difference {found.layers[greatest]:.1e}, after layer {greatest}"
    if line := loss_line(found.loss):
        yield line
    yield verdict(found)


def verdict(found: CheckReport) -> str:
    """One sentence: whether the numbers agree, and if not, where they part."""
    if found.bound is None:
        if found.within:
            return f"Weights in {found.quant} lose precision; no bound is known for their logits."
        return f"Differs: numbers are not finite{_where(found)}."
    of = "relative difference" if found.bound[0] == "max_relative" else "KL divergence"
    most = f"{found.bound[1]:.0e}"
    if found.within:
        return f"Same: the {of} is within {most}, the bound of {found.dtype}."
    much = f"{getattr(found, found.bound[0]):.1e}"
    return f"Differs: the {of} is {much}, the bound of {found.dtype} is {most}{_where(found)}."


def _where(found: CheckReport) -> str:
    if found.parts_at is None:
        return "; all layers agree, so it is the output head or the norm before it"
    return (
        f"; they part in layer {found.parts_at} ({found.layers[found.parts_at]:.1e}, wanted {PARTING[found.dtype]:.0e})"
    )
