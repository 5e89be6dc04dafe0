"""Characters that steer a terminal are made visible; ordinary text is unchanged (`api/formatting.py`)."""

import unicodedata
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moedge.formatting import escape_controls

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
