"""What tokenizing a prompt takes is a part of every plan (`runtime/plan/memory_ledger.py`), and no prompt takes more of
it (`runtime/text/tokenizer.py`).
"""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from moedge.runtime.plan.memory_ledger import TOKENIZER, MemoryLedger
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.settings.errors import PromptError
from moedge.runtime.settings.settings import DeviceBudget, MemoryBudget, Settings, encoder_nbytes
from moedge.runtime.text.tokenizer import Tokenizer
from support.known_shapes import plain_model

GIB, MIB = 1 << 30, 1 << 20
ROOT = Path(__file__).parents[3]
MOST = 20_000
SHAPE = replace(plain_model(), context=131_072)
NOISE = random.Random(41)
TEXTS = {
    "text": (ROOT / "README.md").read_text() * 60,
    "noise": "".join(chr(NOISE.randrange(33, 127)) for _ in range(1 << 20)),
    "Chinese": "日本語の文" * 70_000, "emoji": "\U0001f600" * 260_000, "one letter": "a" * (1 << 20),
    "blanks": " " * (1 << 20), "lines": "\n" * (1 << 20), "long words": "internationalization " * 50_000,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    with Tokenizer.load(ROOT / "examples" / "tiny_moe" / "model") as loaded:
        loaded.encode("Its threads are started.")
        yield loaded


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("share", [1.0, 0.25, 0.06])
def test_no_text_takes_more_than_is_planned_for_the_longest_prompt(
    kind: str, share: float, tokenizer: Tokenizer
) -> None:
    text = TEXTS[kind][: int(len(TEXTS[kind]) * share)]
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    with suppress(PromptError):
        if tokenizer.at_least([text], MOST) <= MOST:
            tokenizer.encode(text)
    assert resident("VmHWM") - before <= encoder_nbytes(MOST)


@pytest.mark.parametrize("device", [None, DeviceBudget(3 * GIB, 100 * MIB, 300 * MIB)], ids=["CPU", "GPU"])
def test_the_ledger_names_it_and_the_budget_has_it(device: DeviceBudget | None) -> None:
    job = Workload(4, 100_000)
    plan = make_plan(SHAPE, Settings(), MemoryBudget(40 * GIB, device), job)
    host = MemoryLedger.of(plan, SHAPE).tiers["host"]
    assert host.arenas[TOKENIZER].planned == encoder_nbytes(job.longest) > 200 * MIB
    assert host.planned == plan.budget.host_nbytes - plan.free_nbytes


def test_a_text_of_few_tokens_and_many_bytes_is_refused_in_words(tmp_path: Path) -> None:
    """With a vocabulary that has tokens of up to 64 blanks, as published ones have."""
    shutil.copytree(ROOT / "examples" / "tiny_moe" / "model", tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    first = max([*vocabulary.values(), *(token["id"] for token in content["added_tokens"])]) + 1
    for power in range(6):
        half = "\u0120" * (1 << power)
        merges.append([half, half])
        vocabulary.setdefault(half + half, first + power)
    file.write_text(json.dumps(content))
    with Tokenizer.load(tmp_path / "model") as loaded:
        assert len(loaded.encode(" " * 64_000)) == 1000
        assert loaded.at_least([" " * 64_000], 1100) == 0
        with pytest.raises(
            PromptError, match=r"1000000 bytes and at least \d+ tokens; at most 16 bytes for each of 20000"
        ):
            loaded.at_least([" " * 1_000_000], MOST)
