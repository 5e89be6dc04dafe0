"""Are kernels right in every size that published models have, and would tests notice if they were not?

Every format in every published width, in every way in which jobs multiply it, under every instruction set; then many
drawn cases of every comparison, and every planted bug until it is found.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

from matrix.state import Part
from moedge.quant.formats.format import FORMATS
from moedge.quant.native import library
from moedge.quant.native.build import SETS
from support.kernels import comparisons
from support.kernels.compared_products import Case, compare, multiple_of, usable, ways_of
from support.published_widths import FIRST_WIDTHS, WIDTHS
from support.seeded_bugs import BUGS, Bug

# Rows at which products take other loops.
ROWS = (1, 7, 13, 30, 129)
EXAMPLES, QUICK_EXAMPLES = 400, 10
SLOW = {"grouped products": 20, "paged attention": 40, "stored keys": 10}
OF_TORCH = ("other products", "key transforms", "grouped products", "paged attention", "stored keys")
QUICK_BUGS = 6


def parts(quick: bool) -> Iterator[Part]:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    widths, examples = (FIRST_WIDTHS, QUICK_EXAMPLES) if quick else (WIDTHS, EXAMPLES)
    for isa in sets():
        for name in FORMATS:
            if ways_of(name, library=True):
                yield Part(f"{name} under {isa}", partial(faults_of_widths, name, True, widths, isa))
        for name in [each for each in comparisons.COMPARISONS if each not in OF_TORCH]:
            yield Part(f"{name} under {isa}, drawn", partial(faults_of_cases, name, examples, isa))
    for name in FORMATS:
        yield Part(f"{name} by torch", partial(faults_of_widths, name, False, widths))
    for name in OF_TORCH:
        yield Part(f"{name}, drawn", partial(faults_of_cases, name, max(1, examples // SLOW.get(name, 1))))
    bugs = [bug for bug in BUGS.values() if bug.is_here]
    for bug in bugs[:: len(bugs) // QUICK_BUGS] if quick else bugs:
        yield Part(f"planted: {bug.name}", partial(faults_of_bug, bug))


def sets() -> list[str]:
    """The instruction sets with which this processor runs the library."""
    best = library.loaded().isa
    return [isa for isa in SETS if best and list(SETS).index(isa) <= list(SETS).index(best)]


@contextmanager
def under(isa: str) -> Iterator[None]:
    """While entered, the library uses an instruction set; "" leaves it as it is."""
    loaded = library.loaded()
    if isa and loaded.library is not None:
        library.choose(loaded.library, isa)
    try:
        yield
    finally:
        if loaded.library is not None:
            library.choose(loaded.library, loaded.isa)


def faults_of_widths(name: str, by_library: bool, widths: tuple[int, ...], isa: str = "") -> list[str]:
    """Widths in which a product is further from its definition than roundings may make it."""
    found, worst, ways = [], 0.0, ways_of(name, by_library)
    held = [width for width in widths if width % multiple_of(name, by_library) == 0]
    with under(isa):
        for index, width in enumerate(held):
            case = Case(name, usable(ways, (64, width)), (64, width), ROWS[index % len(ROWS)], index % 2 == 0, index)
            distance = compare(case)
            worst = max(worst, distance)
            if not distance <= 1:
                found.append(f"{distance:.3g} {case}")
    print(f"  {len(held)} widths in {', '.join(ways)}: at most {worst:.2f} of what roundings may make", flush=True)
    return found


def faults_of_cases(name: str, examples: int, isa: str = "") -> list[str]:
    seen: list[float] = []
    with under(isa):
        try:
            comparisons.run(name, examples, 1, lambda _, distance: seen.append(distance))
        except comparisons.Wrong as error:
            return [str(error)]
    print(f"  {len(seen)} cases: at most {max(seen):.2f} of what roundings may make", flush=True)
    return []


def faults_of_bug(bug: Bug) -> list[str]:
    found = comparisons.examples_until_found(bug)
    print(f"  found by {bug.found_by} after {found} cases", flush=True)
    return [] if found else [f"not found in {comparisons.MOST_EXAMPLES} cases"]
