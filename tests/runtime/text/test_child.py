"""Frames to and from a child process: whole, in order, bounded, and within a deadline (`runtime/text/template.py`)."""

import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moedge.runtime.text.template import Child, pack, unpack


@pytest.fixture
def run() -> Iterator[Any]:
    started: list[Child] = []

    def start(code: str) -> Child:
        started.append(Child((sys.executable, "-c", "import sys, time\n" + code)))
        return started[-1]

    yield start
    for child in started:
        child.kill()


def soon(seconds: float = 30) -> float:
    return time.monotonic() + seconds


ECHO = "while body := sys.stdin.buffer.read1(1 << 20):\n sys.stdout.buffer.write(body)\n sys.stdout.buffer.flush()"


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 65_536, 100_000])
def test_a_frame_comes_back_whole(run: Any, size: int) -> None:
    child = run(f"data = sys.stdin.buffer.read({size + 6}); sys.stdout.buffer.write(data)")
    child.send(pack("a" * size), soon())
    assert unpack(child.receive(soon(), size + 2)) == "a" * size


def test_many_frames_keep_their_order(run: Any) -> None:
    child = run(ECHO)
    for number in range(200):
        child.send(pack(number), soon())
        assert unpack(child.receive(soon(), 10)) == number


@pytest.mark.parametrize("code", ["time.sleep(60)", "print('\\0', flush=True); time.sleep(60)"])
def test_a_silent_or_slow_child_meets_its_deadline(run: Any, code: str) -> None:
    child = run(code)
    with pytest.raises(TimeoutError):
        child.receive(soon(0.2), 10)


def test_a_child_that_does_not_listen_meets_its_deadline(run: Any) -> None:
    with pytest.raises(TimeoutError):
        run("time.sleep(60)").send(bytes(1 << 20), soon(0.2))


def test_a_frame_that_claims_too_much_is_refused_unread(run: Any) -> None:
    child = run("sys.stdout.buffer.write(b'\\xff' * 1000); sys.stdout.flush(); time.sleep(60)")
    with pytest.raises(OverflowError, match="4294967295"):
        child.receive(soon(), 1000)


def test_the_end_of_a_child_is_noticed(run: Any) -> None:
    child = run("")
    with pytest.raises(EOFError):
        child.receive(soon(), 10)
    with pytest.raises(OSError):
        child.send(bytes(1 << 20), soon())
