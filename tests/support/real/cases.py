"""Cases: settings of a job on the real model, and the arrays of them that tests run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from moedge.quant.formats.format import get_format
from moedge.quant.native import library
from moedge.quant.native.build import SETS

# `native` keys and values have the dtype of activations; `isa` is the most that the library may use of a processor.
FACTORS: dict[str, tuple[str, ...]] = {
    "quant": ("none", "int8", "int4", "nf4", "mxfp4"),
    "compute": ("float", "int8"),
    "kv": ("native", "int8", "int8/int4", "int4"),
    "attention": ("torch", "native", "triton"),
    "isa": ("none", *SETS),
    "dtype": ("bf16", "fp32"),
}  # fmt: skip

# By how much perplexity may differ from that of transformers in float32 with the weights that the format means: the
# rounding of bf16 and of activations, and what the cache's format loses (docs/quality.md).
MOST = {"native": 0.01, "int8": 0.01, "int8/int4": 0.04, "int4": 0.06}


@dataclass(frozen=True, slots=True)
class Case:
    """Values of FACTORS."""

    quant: str = "none"
    compute: str = "float"
    kv: str = "native"
    attention: str = "native"
    isa: str = "avx512bf16"
    dtype: str = "bf16"

    @property
    def title(self) -> str:
        return " ".join(asdict(self).values()).replace("/", "+")

    @property
    def deterministic(self) -> bool:
        """Jobs in float32 are, but with attention that has no such promise."""
        return self.dtype == "fp32" and self.attention == "torch"

    @property
    def options(self) -> dict[str, Any]:
        """The options of `moedge.LLM`."""
        quant, _, experts = self.quant.partition("+")
        return {
            "quant": quant, "experts": experts or "same", "compute": self.compute, "attention": self.attention,
            "dtype": self.dtype, "kv": self.dtype if self.kv == "native" else self.kv,
            "deterministic": self.deterministic,
        }  # fmt: skip


def valid(case: Case) -> bool:
    """Whether a job may have these settings: others are refused in words."""
    if case.compute == "int8":
        kernels = case.isa != "none" and case.dtype == "bf16"
        form = get_format(case.quant)
        if not (form.whole_rows or (kernels and form.reads_integers)):
            return False
    return not (case.attention == "native" and case.isa == "none")


def product(factors: dict[str, tuple[str, ...]]) -> list[Case]:
    """Every valid case of the factors."""
    cases = (Case(**dict(zip(factors, values, strict=True))) for values in itertools.product(*factors.values()))
    return [case for case in cases if valid(case)]


def pairs(case: Case) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    return set(itertools.combinations(asdict(case).items(), 2))


def pairwise(
    every: Iterable[Case], begin: Iterable[Case] = (), covers: Callable[[Case], set[Any]] = pairs
) -> list[Case]:
    """Cases of `every` that have every pair of values which any of them has, `begin` first: each next one has the most
    pairs that none before it has."""
    pool, chosen = list(every), list(begin)
    missing = set().union(*map(covers, pool)).difference(*map(covers, chosen))
    while missing:
        best = max(pool, key=lambda case: len(covers(case) & missing))
        chosen.append(best)
        missing -= covers(best)
    return chosen


@cache
def here() -> dict[str, tuple[str, ...]]:
    """The factors with the instruction sets of this machine."""
    sets = list(SETS)
    most = library.loaded().isa
    return FACTORS | {"isa": ("none", *sets[: sets.index(most) + 1])} if most else FACTORS | {"isa": ("none",)}


def best_isa() -> str:
    return here()["isa"][-1]


def weights_and_compute() -> Iterator[Case]:
    """Every format with every way to multiply it, on the best that the machine has: the table of real answers."""
    isa = best_isa()
    attention = "torch" if isa == "none" else "native"
    for quant, compute in itertools.product(FACTORS["quant"], FACTORS["compute"]):
        if valid(case := Case(quant, compute, isa=isa, attention=attention)):
            yield case


def exact() -> Iterator[Case]:
    """Every format in float32, with `--deterministic`."""
    for case in weights_and_compute():
        if case.compute == "float":
            yield Case(case.quant, isa=case.isa, attention="torch", dtype="fp32")


def cover() -> list[Case]:
    return pairwise(product(here()), [*weights_and_compute(), *exact()])
