"""Kernels are tried in processes of their own (`runtime/loading/selftest.py`): one that crashes falls back, one that
passed is not tried again.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedge.runtime.loading import selftest as isolated
from moedge.runtime.loading.selftest import KernelNeeds, run_apart

FAMILIES = ("attention", "cache", "experts", "sampling")
NEEDS = KernelNeeds("bf16", ((8, 4, 64, None), (2, 8, 128, 4096)), ((2880, 2880),))


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], Callable[[], int]]:
    """`worker(by family)` stands in for the process: what it does for a family, `say(...)` by default.

    Returns the number of processes so far.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(isolated, "_key", lambda device, needs: repr(needs))
    log = tmp_path / "started"

    def use(actions: dict[str, str]) -> Callable[[], int]:
        program = (
            "import json, os, sys, time\n"
            f"open({str(log)!r}, 'a').write(sys.argv[1] + chr(10))\n"
            "say = lambda lack='': print('self-test: ' + lack, flush=True)\n"
            f"exec({actions!r}.get(json.loads(sys.argv[1])[1], 'say()'))\n"
        )
        monkeypatch.setattr(isolated, "_COMMAND", (sys.executable, "-c", program))
        return lambda: len(log.read_text().splitlines()) if log.exists() else 0

    return use


def tried(needs: KernelNeeds = NEEDS) -> dict[str, str]:
    device: Any = SimpleNamespace(torch_device=torch.device("cuda", 1), available=8 << 30)
    return run_apart(device, needs, FAMILIES)


def test_what_passed_is_not_tried_again_and_other_needs_are(worker: Any, tmp_path: Path) -> None:
    count = worker({})
    assert tried() == tried() == dict.fromkeys(FAMILIES, "")
    assert count() == len(FAMILIES)
    requests = [json.loads(line) for line in (tmp_path / "started").read_text().splitlines()]
    assert {request.pop(1) for request in requests} == set(FAMILIES)
    assert requests == [[1, ["bf16", [[8, 4, 64, None], [2, 8, 128, 4096]], [[2880, 2880]]]]] * len(FAMILIES)
    tried(NEEDS._replace(experts=((2880, 1440),)))
    assert count() == 2 * len(FAMILIES)
    next(tmp_path.rglob("kernel-selftests.json")).write_text("{broken")
    assert tried() == dict.fromkeys(FAMILIES, "")
    assert count() == 3 * len(FAMILIES)


def test_a_kernel_that_crashes_or_is_wrong_falls_back_alone(worker: Any) -> None:
    count = worker({"cache": "os.kill(os.getpid(), 11)", "experts": "say('wrong numbers')"})
    found = tried()
    assert (found["attention"], found["experts"]) == ("", "wrong numbers")
    assert found["cache"].endswith("the process that tried them was ended by signal 11")
    # Only what failed is tried again.
    assert tried() == found
    assert count() == len(FAMILIES) + 2


def test_the_reason_of_an_error_is_its_last_line(worker: Any) -> None:
    worker({"experts": "raise SystemExit('no such GPU')"})
    assert tried()["experts"].endswith("ended with exit code 1: no such GPU")


def test_kernels_that_never_end_are_given_up(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker({"cache": "time.sleep(600)"})
    monkeypatch.setattr(isolated, "TIMEOUT_S", 1.0)
    assert tried()["cache"].endswith("they took more than 1 seconds")
