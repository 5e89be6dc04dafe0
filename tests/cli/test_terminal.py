"""Characters that steer a terminal are made visible; ordinary text is unchanged (`api/formatting.py`)."""

import unicodedata
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moedge.formatting import duration, escape_controls, speed

quiet = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quiet
@given(st.text())
def test_nothing_that_steers_a_terminal_is_left(text: str) -> None:
    escaped = escape_controls(text)
    assert escaped.encode().decode() == escaped
    assert not [c for c in escaped if unicodedata.category(c) == "Cc" and c not in "\n\t"]
    assert not [
        c
        for c in escaped
        if unicodedata.bidirectional(c) in ("LRO", "RLO", "LRE", "RLE", "PDF", "LRI", "RLI", "FSI", "PDI")
    ]


@quiet
@given(st.text(st.characters(categories=["L", "N", "P", "S", "Mn"]) | st.sampled_from("\n\t ")))
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert escape_controls(text) == text


def test_controls_are_made_visible() -> None:
    assert escape_controls("a\x1b[31m\r\x07\x9b\u202e\ud800") == r"a\x1b[31m\r\x07\x9b\u202e\ud800"


def test_an_answer_cannot_drive_the_terminal(
    cli: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("moedge.generation.answer", lambda *_: iter(["a\x1b]0;owned\x07", "\x1b[2Jb\u202e"]))
    assert cli("run", files("moedge.demo") / "model", "hi") == 0
    assert capsys.readouterr().out == "a\\x1b]0;owned\\x07\\x1b[2Jb\\u202e\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.46, "4.5 s"),
        (123, "2:03"),
        (3723, "1:02:03"),
        (48 * 3600 - 1, "47:59:59"),
        (48 * 3600, "2 days"),
        (2.25e6, "26 days"),
    ],
)
def test_what_takes_days_is_in_days(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("tokens_per_second", "text"),
    [
        (0, "0.0 tok/s"),
        (0.083, "12 s per token"),
        (0.9, "1.11 s per token"),
        (1, "1.0 tok/s"),
        (11.54, "11.5 tok/s"),
        (1234.5, "1,234 tok/s"),
    ],
)
def test_a_token_that_takes_seconds_is_in_seconds(tokens_per_second: float, text: str) -> None:
    assert speed(tokens_per_second) == text
