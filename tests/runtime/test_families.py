"""Families with a feature each, whole: streamed at the smallest budget and packed, with transformers' tokens."""

from dataclasses import replace
from pathlib import Path

import pytest

from moedge.runtime.model import attention_seam
from moedge.runtime.shape import config as windows
from support.family_run import FamilyRun, run_family
from support.tiny_families import FEATURES


# `make matrix ARGS=--quick` runs qwen3_moe and gpt_oss.
@pytest.mark.sample("llama4_text")
@pytest.mark.parametrize("family", [*FEATURES, "axk2", "glm_moe_dsa", "nemotron", "qwen4_exp_text"])
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    assert run_family(family, tmp_path).failure == ""


@pytest.mark.slow
def test_without_its_own_lines_llama4_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: queries scaled by their place in the pass, as the stock module does it."""
    monkeypatch.setattr(attention_seam, "RESCALE", "no such attribute")
    assert "differ" in run_family("llama4_text", tmp_path).failure


@pytest.mark.slow
def test_a_chunk_taken_for_a_window_is_refused_or_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_seam, "_is_chunked", lambda module: False)
    assert "differ" in run_family("llama4_text", tmp_path).failure


def test_a_window_that_the_cache_was_not_planned_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(windows.SLIDING, "phimoe", lambda config, layer: layer == 0)
    with pytest.raises(Exception, match=r"layer 1 looks back 16 tokens, and config\.json says None"):
        run_family("phimoe", tmp_path)


def test_a_run_that_shows_nothing_fails() -> None:
    rows = [[token, token + 1] for token in range(0, 60, 2)]
    good = FamilyRun(rows, rows, rows, rows * 2, 1, 9, 3, 3)
    assert good.failure == ""
    assert "0 bytes streamed" in replace(good, nbytes_streamed=0).failure
    assert "2 sequences ran at once" in replace(good, most_at_once=2).failure
    few = rows[:2]
    assert "degenerate" in replace(good, expected=few, streamed=few, packed=few, three=few * 2).failure
    assert "streamed: tokens of 1 of 30" in replace(good, streamed=[[0, 0], *rows[1:]]).failure
    assert "three at a time: tokens of 1 of 60" in replace(good, three=[*rows, [0, 0], *rows[1:]]).failure
