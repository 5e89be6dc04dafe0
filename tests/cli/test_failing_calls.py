"""Whole commands (`cli/`) whose k-th call to the system fails, for every k: a sentence, a documented exit code, and the
same command then goes on and loses nothing. `make matrix ARGS=failing_calls` tries every k; here is a sample.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moedge.offload.errors import ExitCode
from support.document_folder import GOOD
from support.failing_calls import ERRORS, ROOT, Commands, Ended, Fault, build

MODEL = ROOT / "examples" / "tiny_moe" / "model"
BUDGET = ("--ram", "2GiB", "--gpu-mem", "0", "--deterministic", "-q")
DOCUMENTS = ("report.pdf", "letter.docx", "offer.eml", "plain.txt")


class Scenario:
    """A command over a folder `work`, which `reset` makes as it was before; `found` is what the command leaves."""

    def __init__(self, folder: Path, commands: Commands, name: str) -> None:
        self.work, self._before, self.commands = folder / "work", folder / "before", commands
        self._before.mkdir()
        self.reset()
        self.command = getattr(self, f"_{name}")()
        self.reset()

    def reset(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self._before, self.work)

    def found(self) -> dict[str, bytes]:
        files = (path for path in self.work.rglob("*") if path.is_file() and ".job" not in str(path))
        return {str(path.relative_to(self.work)): path.read_bytes() for path in files if path.name != "lock"}

    def _rows(self) -> tuple[object, ...]:
        lines = [{"id": str(index), "prompt": f"And {index}", "max_tokens": 3} for index in range(8)]
        (self._before / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return "batch", MODEL, self.work / "rows.jsonl", "-o", self.work / "out.jsonl", *BUDGET

    def _resumed(self) -> tuple[object, ...]:
        """Of eight rows, three were answered before."""
        command = self._rows()
        self.reset()
        assert self.commands.run([*command, "--max-rows", "3"]).code == ExitCode.STOPPED
        shutil.rmtree(self._before)
        shutil.copytree(self.work, self._before)
        return command

    def _documents(self) -> tuple[object, ...]:
        (self._before / "in").mkdir()
        for name in DOCUMENTS:
            (self._before / "in" / name).write_bytes(GOOD[name][0])
        asked = ("--prompt", "Say x.", "--max-tokens", "2")
        return "docs", MODEL, self.work / "in", "-o", self.work / "out.jsonl", *asked, *BUDGET

    def _prepare(self) -> tuple[object, ...]:
        return "prepare", MODEL, "-o", self.work / "store", "--ram", "2GiB", "--quant", "int8"


SCENARIOS = ("rows", "resumed", "documents", "prepare")


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = tmp_path_factory.mktemp("failing")
    variables = {f"XDG_{kind.upper()}_HOME": str(folder / kind) for kind in ("state", "cache", "config")}
    with Commands(build(folder), folder, variables) as running:
        yield running


@pytest.fixture
def scenario(commands: Commands, tmp_path: Path) -> Callable[[str], Scenario]:
    return lambda name: Scenario(tmp_path, commands, name)


def wrong(ended: Ended) -> str:
    if ended.code is None:
        return "it hung"
    if ended.code == ExitCode.BUG or ended.code not in {code.value for code in ExitCode}:
        return f"exit code {ended.code}"
    if "Traceback" in ended.said:
        return "a traceback"
    # Of rows that failed, the file of errors says why; `-q` is silent.
    silent = ended.code not in (ExitCode.OK, ExitCode.SOME_ROWS_FAILED) and not ended.said.strip()
    return "no word of it" if silent else ""


def tried(scenario: Scenario, call: str, every: int) -> Iterator[str]:
    """What was wrong at every `every`-th call of this name; prints how many were tried and how they ended."""
    # Counts all calls, and none fails.
    counting = scenario.commands.run(scenario.command, Fault(call, 1 << 30, errno.EIO, str(scenario.work)))
    assert counting.code == 0
    reference, codes, count = scenario.found(), Counter[int | None](), counting.counted
    for last in range(1, count + 1, every):
        number = ERRORS[call][last % len(ERRORS[call])]
        what = f"{call} {last} of {count}, {errno.errorcode[number]}"
        scenario.reset()
        ended = scenario.commands.run(scenario.command, Fault(call, last, number, str(scenario.work)))
        codes[ended.code] += 1
        fault = wrong(ended) or ("it said that all is well" * (ended.code == 0 and scenario.found() != reference))
        faults = [f"{what}: {fault}: {ended.said[-1500:]}"] if fault else []
        again = scenario.commands.run(scenario.command)
        if again.code != 0 or scenario.found() != reference:
            faults += [f"{what}: exit code {ended.code}, then {again.code}: {ended.said[-500:]}{again.said[-500:]}"]
        # Now and not at the end: a run of every k takes long.
        print(*faults, sep="\n", end="", flush=True)
        yield from faults
    print(f"{call}: {sum(codes.values())} of {count} calls failed, exit codes {dict(codes)}")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "call"), [("rows", "write"), ("prepare", "rename")])
def test_a_call_that_fails_is_a_sentence_and_the_command_goes_on(
    name: str, call: str, scenario: Callable[[str], Scenario]
) -> None:
    assert list(tried(scenario(name), call, 13)) == []


@pytest.mark.slow
@pytest.mark.parametrize("call", ERRORS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_call_that_fails_is_a_sentence_and_the_command_goes_on(
    name: str, call: str, scenario: Callable[[str], Scenario]
) -> None:
    assert list(tried(scenario(name), call, 1)) == []


def test_a_command_that_ignores_a_failure_would_be_noticed() -> None:
    assert wrong(Ended(None, "", 1)) == "it hung"
    assert wrong(Ended(1, "x", 1)) == "exit code 1"
    assert wrong(Ended(8, "Traceback (most recent call last):", 1)) == "a traceback"
    assert wrong(Ended(8, "", 1)) == "no word of it"
    assert wrong(Ended(8, "moedge: no space left", 1)) == ""
