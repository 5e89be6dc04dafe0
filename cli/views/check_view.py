"""What `moedge check` prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from ...runtime.evaluation.check import CheckReport
from ...runtime.settings.formatting import fit, loss_line


def print_check(found: CheckReport) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    width = console.width if sys.stdout.isatty() else None
    for line in lines(found):
        console.print(fit(line, width))


def lines(found: CheckReport) -> Iterator[str]:
    """The report, for people."""
    how = f"weights {found.quant}, compute {found.compute}, keys and values {found.kv}, dtype {found.dtype}"
    yield f"{found.model}: {how}; {found.prompts} prompts, {found.tokens:,} tokens"
    how = "transformers' own loading" if found.reference == "transformers" else "transformers' code, a layer at a time"
    yield f"against {how}, in float32" + (f": {found.why}" if found.why else "")
    yield f"logits   greatest difference {found.max_abs:.1e}, relative {found.max_relative:.1e}"
    yield f"         greatest KL divergence {found.kl:.1e} nats"
    yield f"tokens   {found.greedy_same} of {found.greedy_total} greedy ones are the same"
    yield f"layers   greatest relative difference {_greatest(found.layers)}"
    yield f"alone    from the same input {_greatest(found.local)}; output head {found.head:.1e}"
    if any(found.rerouted):
        yield f"         other experts for at most {max(found.rerouted):.1%} of a layer's tokens"
    worst = max(found.parts, key=lambda part: part.error / part.bound)
    yield f"parts    products and attention differ by at most {worst.error / worst.bound:.2f} of their bounds"
    if line := loss_line(found.loss):
        yield line
    yield verdict(found)


def verdict(found: CheckReport) -> str:
    """One sentence: whether the numbers agree, and if not, where they part."""
    if not found.within:
        return f"Differs: {found.difference}."
    rounding = f"the rounding of {found.dtype}" + (" and of activations in int8" if found.compute == "int8" else "")
    return f"Same: from the same input, all layers and the output head differ by {rounding} only."


def _greatest(errors: Sequence[float]) -> str:
    greatest = max(range(len(errors)), key=lambda index: errors[index])
    return f"{errors[greatest]:.1e}, after layer {greatest}"
