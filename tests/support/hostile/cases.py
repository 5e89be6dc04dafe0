"""Spoiled checkpoints by number, and what becomes of one that is read as `moedge batch` reads it."""

import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moedge.offload.errors import BadCheckpoint
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.shape.checkpoint_shape import read_shape
from moedge.runtime.shape.model_shape import ModelShape
from support.hostile import configs as hostile_configs  # noqa: F401 (registers mutations)
from support.hostile.draft import Draft, take_apart
from support.hostile.mutations import ACCEPT, MUTATIONS, REFUSE

Load = Callable[[Path, ModelShape], None]


@dataclass(frozen=True, slots=True)
class Case:
    """`kinds` are the mutations that were made of a good checkpoint."""

    kinds: tuple[str, ...]
    draft: Draft
    verdict: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """`seconds` are the CPU's; `wrong` says what should not have happened, None where all is well."""

    refused: bool
    message: str
    seconds: float
    wrong: str | None


def make_case(seed: int, folders: Sequence[Path]) -> Case:
    """One to three mutations; the first goes round all of them, so that every kind occurs."""
    rng = random.Random(seed)
    while True:
        draft = take_apart(rng.choice(folders), num_files=rng.choice([1, 2]))
        names = [list(MUTATIONS)[seed % len(MUTATIONS)]]
        names += rng.sample(sorted(MUTATIONS), rng.choice([0, 0, 1, 2]))
        verdicts = [(name, MUTATIONS[name](draft, rng)) for name in names]
        if verdicts[0][1] is not None:
            made = [(name, verdict) for name, verdict in verdicts if verdict is not None]
            refused = any(verdict == REFUSE for _, verdict in made)
            return Case(tuple(name for name, _ in made), draft, REFUSE if refused else ACCEPT)


def judge(case: Case, folder: Path, load: Load) -> Outcome:
    """Writes the checkpoint, reads its shape and, where that is accepted, its weights."""
    shutil.rmtree(folder, ignore_errors=True)
    case.draft.write(folder)
    # On a machine that does other work, or where this process is stopped for a while, a case waits for longer than it
    # computes.
    started = time.process_time()
    message, wrong = "", None
    try:
        load(folder, read_shape(folder))
    except (BadCheckpoint, UnsupportedModel) as error:
        message = str(error)
    except Exception as error:
        message, wrong = repr(error), f"{type(error).__name__} in place of a refusal"
    seconds = time.process_time() - started
    if wrong is None and bool(message) != (case.verdict == REFUSE):
        wrong = "refused" if message else "accepted"
    if wrong is None and not (message.isprintable() and len(message) < 4000):
        wrong = "a message that a terminal cannot show"
    return Outcome(bool(message), message, seconds, wrong)
