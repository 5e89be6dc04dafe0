"""The table of what weights and arithmetics cost, as Markdown: of `make real`, and of bench.real_quality."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from support.real.cases import Case
from support.real.measure import Found
from support.real.text import FRANCE, same_answers

# `defined(quant, compute, packed_from, dtype)`: what transformers finds in `dtype` with the weights of a format.
Definitions = Callable[[str, str, str, str], Found]
HEAD = (
    "weights", "compute", "perplexity", "against float32", "capital of France", "answers as in float32",
    "as its definition has them", "which in bf16 reaches",
)  # fmt: skip


def row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def loss(found: float, exact: float) -> str:
    return f"{found / exact - 1:+.2%}"


def weights(results: Iterable[tuple[Case, Found]], defined: Definitions) -> Iterator[str]:
    """Beside transformers with the file's weights in float32, and beside each format's own definition."""
    exact = defined("none", "float", "fp32", "fp32")
    yield row(*HEAD)
    yield "|" + "---|" * len(HEAD)
    yield row("transformers, fp32", "", f"{exact.perplexity:.4f}", "", exact.texts[FRANCE], "", "", "")
    for case, found in results:
        wanted, in_bf16 = (defined(case.quant, case.compute, "bf16", dtype) for dtype in ("fp32", "bf16"))
        pairs = ((found, exact), (found, wanted), (in_bf16, wanted))
        same = [f"{same_answers(a.answers, b.answers)}/{len(a.answers)}" for a, b in pairs]
        against = loss(found.perplexity, exact.perplexity)
        yield row(case.quant, case.compute, f"{found.perplexity:.4f}", against, found.texts[FRANCE], *same)
