"""Does a preparation that is killed again and again end with the bytes of one that was left alone?

    python bench/prepare_kill.py [--kills 300] [--seed 0]

A process prepares the demo model and is killed (SIGKILL) at a random instant; what it left must not open, or be whole;
then it starts again, until it ends by itself. The finished store is compared, file by file, with an uninterrupted one.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path

from killing import finish, killed

from moedge.offload.errors import BadStore
from moedge.offload.store.store import Store
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.settings.budgets import Budgets
from moedge.runtime.source.model_source import open_source


def make(folder: Path) -> None:
    """Prepares the demo model."""
    with as_file(files("moedge.demo")) as demo, open_source(str(demo / "model")) as source:
        prepare(source, folder, "nf4", "bf16", Budgets())


def left_behind(folder: Path) -> str:
    """What the kill left: the words of the final table. A store that opens must be whole."""
    try:
        with Store.open(folder) as store:
            if not all(sound for _, sound in store.verify()):
                raise SystemExit(f"{folder}: a store opened that is not whole")
        return "a whole store"
    except BadStore:
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if any(name.endswith(".tmp") for name in names):
        return "a file half written"
    return "finished files" if len(names) > 1 else "nothing"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def seconds_alone(folder: Path) -> float:
    begin = time.perf_counter()
    finish(partial(make, folder))
    return time.perf_counter() - begin


def run(root: Path, kills: int, seed: int) -> None:
    generator, left, finished = random.Random(seed), Counter[str](), 0
    seconds = min(seconds_alone(root / f"alone-{trial}") for trial in range(5))
    wanted = snapshot(root / "alone-0")
    while left.total() < kills:
        folder = root / f"{finished}"
        work = partial(make, folder)
        # Lives that may be too short for a whole store: every part of the work is interrupted, and gone on with.
        while left.total() < kills and killed(work, generator.uniform(0, seconds)):
            left[left_behind(folder)] += 1
        finish(work)
        if snapshot(folder) != wanted:
            raise SystemExit(f"{folder} differs from a store that was written without a kill")
        finished += 1
    print(f"{kills} kills over {seconds:.2f} s of preparing; {finished} stores ended with the same bytes; kills left")
    for what, times in left.most_common():
        print(f"  {times:4}  {what}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), arguments.kills, arguments.seed)
