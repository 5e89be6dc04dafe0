"""Does anything show in the bits of a deterministic row? Random trials: 39 families in six variations each.

Each trial is drawn from its family and number, which are printed: precision, passes, memory, streaming, blocks, tight
pools, threads, and the rows beside a row (support/exact_trials.py). The last part wants all of that to have happened:
what never occurs shows nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers

from matrix.state import FOLDER, Part
from moedge.runtime.source.model_source import open_source
from support.exact_trials import FAMILIES, Trial, drawn, faults
from support.tiny_families import save_tiny

VARIATIONS, QUICK_VARIATIONS, QUICK = 6, 2, ("deepseek_v2", "qwen3_moe")
HAPPENED = FOLDER / "exact-happened.json"
# Of the trials, at least: memory is short in half of them, and a pool in half.
LEAST = {"streamed": 0.2, "shared": 0.2, "preempted": 0.15, "parked": 0.03}


def parts(quick: bool) -> Iterator[Part]:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    for family in QUICK if quick else FAMILIES:
        yield Part(family, partial(family_faults, family, QUICK_VARIATIONS if quick else VARIATIONS))
    if not quick:
        yield Part("what happened", happened_faults)


def family_faults(family: str, variations: int) -> list[str]:
    wrong: list[str] = []
    happened: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        save_tiny(family, Path(name) / "model")
        with open_source(str(Path(name) / "model")) as source:
            for variation in range(variations):
                found, counts = faults(Trial(source, Path(name)), *drawn(family, variation))
                happened += counts
                print(f"  {family} {variation}: {'; '.join(found) or 'same bits'}, {dict(+counts)}", flush=True)
                wrong += [f"variation {variation}: {each}" for each in found]
    HAPPENED.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(HAPPENED.read_text()) if HAPPENED.exists() else {}
    HAPPENED.write_text(json.dumps(before | {family: dict(happened) | {"trials": variations}}, indent=1))
    return wrong


def happened_faults() -> list[str]:
    """What too few trials came to."""
    by_family = json.loads(HAPPENED.read_text())
    total = sum((Counter(counts) for counts in by_family.values()), Counter())
    print(f"  {dict(total)}")
    return [
        f"{what} in {total[what]} of {total['trials']} trials, wanted {share:.0%}"
        for what, share in LEAST.items()
        if total[what] < share * total["trials"]
    ]
