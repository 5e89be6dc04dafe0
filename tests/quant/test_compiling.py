"""How kernels are chosen, measured and judged that are compiled for GPUs which are not there
(`tests/matrix/compiling/`); Triton is not needed.
"""

import itertools
import json
from types import SimpleNamespace
from typing import Any

import pytest

from matrix.compiling import main, rules, tritons
from matrix.compiling.pairwise import pairwise

FACTS = {
    "registers": 96, "spill": 0, "spills_in_loop": False, "shared": 20 << 10, "warps": 4, "mma": True, "codes": [16],
}  # fmt: skip
HOT = SimpleNamespace(hot=True, dots=True, line=32, reads=True)


def test_every_pair_of_values_meets() -> None:
    factors = {"a": range(5), "b": range(4), "c": range(4), "d": range(3), "e": range(2)}
    rows = pairwise(factors, lambda row: row["a"] != 0 or row["b"] == 1)
    assert all((row["a"] != 0 or row["b"] == 1) and set(row) == set(factors) for row in rows)
    for first, second in itertools.combinations(factors, 2):
        met = {(row[first], row[second]) for row in rows}
        wanted = set(itertools.product(factors[first], factors[second]))
        assert met == (wanted - {(0, 0), (0, 2), (0, 3)} if (first, second) == ("a", "b") else wanted)
    # 20 pairs of the two largest, 1,440 combinations in all.
    assert len(rows) <= 30


@pytest.mark.parametrize(
    ("changed", "arch", "warps"),
    [
        # 96 registers a thread: 5 warps a part of an SM.
        ({"shared": 0}, 86, 20),
        # 21 KiB with the driver's: 4 blocks in 100 KiB, 7 in 164.
        ({}, 86, 16),
        ({"registers": 40}, 80, 28),
        # No more than an SM has warps and blocks.
        ({"registers": 16, "shared": 0}, 75, 32),
        ({"registers": 16, "shared": 0, "warps": 1}, 86, 16),
        # 8 warps of 255 registers: 2 a part.
        ({"registers": 255, "warps": 8, "shared": 0}, 90, 8),
    ],
)
def test_warps_of_an_sm(changed: dict[str, Any], arch: int, warps: int) -> None:
    assert rules.warps_per_sm(FACTS | changed, arch) == warps


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"codes": [1, 16]}, "codes are loaded [1] bytes wide"),
        ({"codes": []}, "no load of codes"),
        ({"mma": False}, "no tensor cores"),
        ({"shared": 100 << 10}, "shared memory"),
        ({"spill": 4, "spills_in_loop": True}, "spill in a loop"),
        ({"spill": 24}, "spill outside of loops"),
        ({"registers": 200}, "8 warps an SM"),
    ],
)
def test_each_rule_can_be_broken(changed: dict[str, Any], words: str) -> None:
    assert list(rules.broken(HOT, FACTS, 86)) == []
    assert any(words in broken for broken in rules.broken(HOT, FACTS | changed, 86))


def test_a_triton_that_no_torch_pins_may_spill_a_little_in_a_loop() -> None:
    facts = FACTS | {"spill": 16, "spills_in_loop": True}
    assert list(rules.broken(HOT, facts, 120, pinned=False)) == []
    assert len(list(rules.broken(HOT, facts, 120, pinned=True))) == 1
    assert len(list(rules.broken(HOT, facts | {"spill": 24}, 120, pinned=False))) == 1


def test_what_is_not_hot_may_only_improve() -> None:
    report = {"name": "extend", "arch": 86, "hot": False, "spill": 8, "warps_per_sm": 8}
    assert main.worse(report, {"extend": {"86": [8, 8]}}) == []
    assert main.worse(report, {"extend": {"86": [16, 4]}}) == []
    assert main.worse(report, {"extend": {"86": [0, 8]}}) == ["8 bytes spill, 0 are recorded"]
    assert main.worse(report, {"extend": {"86": [8, 12]}}) == ["8 warps an SM, 12 are recorded"]
    assert "no record" in main.worse(report, {})[0]


def test_wheels_that_pin_another_triton_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    table = tritons.pinned()
    newest = list(table)[-1]

    def wheel(requirement: str) -> tuple[str, str | None] | None:
        torch = requirement.removeprefix("torch===") if "===" in requirement else newest
        return torch, table[torch]

    monkeypatch.setattr(tritons, "wheel_pins", wheel)
    assert tritons.differences() == []
    # The CPU's wheels pin nothing.
    monkeypatch.setattr(tritons, "wheel_pins", lambda requirement: (wheel(requirement)[0], None))
    assert tritons.differences() == []
    monkeypatch.setattr(tritons, "wheel_pins", lambda requirement: (wheel(requirement)[0], "9.9.9"))
    assert len(tritons.differences()) == len(table)
    monkeypatch.setattr(tritons, "wheel_pins", lambda requirement: None if "===" in requirement else ("9.0", "9.9.9"))
    assert "torch 9.0 is supported" in tritons.differences()[0]
    monkeypatch.setattr(tritons, "wheel_pins", lambda requirement: None)
    assert tritons.differences() is None


def test_this_environment_interprets_what_users_have() -> None:
    """The test extra takes what the newest supported torch pins, and the oldest one's where torch is held back."""
    text = (tritons.ROOT / "pyproject.toml").read_text()
    oldest, newest = tritons.oldest_and_newest_pinned()
    assert f'"triton>={oldest},<={newest}; sys_platform' in text
    assert f"\ntriton=={oldest}\n" in (tritons.ROOT / "tests/matrix/oldest.txt").read_text()


def test_everything_that_is_recorded_has_figures() -> None:
    ratchet = json.loads(main.RATCHET.read_text())
    assert len(ratchet) > 50
    figures = [pair for entry in ratchet.values() for pair in entry.values()]
    assert all(0 <= spill <= rules.MOST_SPILLED and warps > 0 for spill, warps in figures)
