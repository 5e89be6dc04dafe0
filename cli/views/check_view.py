"""What `moedge check` prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from ...runtime.evaluation.check import ALWAYS_MOST, MOST_REROUTED, CheckReport
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
    yield f"layers   greatest relative difference {_greatest(found.layers)}"
    yield f"alone    from the same input {_greatest(found.local)}; output head {found.head:.1e}"
    if any(found.rerouted):
        yield f"         other experts for at most {max(found.rerouted):.1%} of a layer's tokens"
    if line := loss_line(found.loss):
        yield line
    yield verdict(found)


def verdict(found: CheckReport) -> str:
    """One sentence: whether the numbers agree, and if not, where they part."""
    if not found.lossless:
        if found.within:
            return f"Weights in {found.quant} lose precision; no bound is known for their logits."
        return "Differs: numbers are not finite."
    if not found.within:
        return f"Differs: {_where(found)}."
    return f"Same: from the same input, all layers and the output head differ by the rounding of {found.dtype} only."


def _where(found: CheckReport) -> str:
    """What differs first from the same input, by how much, and what was wanted."""
    at = found.parts_at
    if at is None:
        much = f"by {found.head:.1e}, wanted {ALWAYS_MOST[found.dtype]:.0e}"
        return f"all layers agree, but the output head, or the norm before it, differs {much}"
    if found.rerouted[at] > MOST_REROUTED:
        share = f"for {found.rerouted[at]:.0%} of its tokens, wanted at most {MOST_REROUTED:.0%}"
        return f"layer {at} is the first to part, from the same input: its router chooses other experts {share}"
    much = f"by {found.local[at]:.1e}, wanted {found.bounds[at]:.1e}"
    return f"layer {at} is the first to part, from the same input: its output differs {much}"


def _greatest(errors: Sequence[float]) -> str:
    greatest = max(range(len(errors)), key=lambda index: errors[index])
    return f"{errors[greatest]:.1e}, after layer {greatest}"
