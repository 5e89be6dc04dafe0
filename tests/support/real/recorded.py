"""What formats' definitions gave, which transformers takes ten minutes to say; a test computes some of it again.

    cd tests && python -m support.real.recorded original rotated

writes definitions/NAME.json anew, in a process for each.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from support.real.cases import exact, weights_and_compute
from support.real.measure import Found
from support.real.text import FEW

FOLDER = Path(__file__).with_name("definitions")
# 1,532 predicted tokens: enough for one part in a hundred of the same tokens, and two seconds a case.
NUM_WINDOWS = 4
# Arguments of `Stock.define`.
Key = tuple[str, ...]


@cache
def recorded(name: str) -> Mapping[Key, Found]:
    """Of a model of tests/real/conftest.py; none of `shallow`, which is soon computed."""
    path = FOLDER / f"{name}.json"
    lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {tuple(key.split()): Found(*found) for key, *found in lines}


def keys(name: str) -> Iterator[Key]:
    """What the tests ask of a model: what it loses, what bf16 gives, and of the original what float32 gives."""
    for case in weights_and_compute():
        yield case.quant, case.compute, "bf16", "fp32"
        yield case.quant, case.compute, "bf16", "bf16"
    for case in exact() if name == "original" else [next(exact())]:
        yield case.quant, case.compute, "fp32", "fp32"


def num_windows(key: Key) -> int:
    """In bf16 answers alone."""
    return NUM_WINDOWS if key[3] == "fp32" else 0


def record(name: str) -> None:
    from support.real.definition import Stock
    from support.real.rotation import rotated
    from support.real.smollm2 import smollm2

    stock = Stock({"original": smollm2, "rotated": rotated}[name]())
    with (FOLDER / f"{name}.json").open("w") as file:
        for key in keys(name):
            found = stock.define(*key).ask(num_windows(key), FEW)
            logprobs = [[round(each, 4) for each in window] for window in found.logprobs]
            print(json.dumps([" ".join(key), logprobs, found.answers, found.texts]), file=file, flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        record(sys.argv[1])
    else:
        every = [subprocess.Popen([sys.executable, "-m", "support.real.recorded", name]) for name in sys.argv[1:]]
        sys.exit(any(each.wait() for each in every))
