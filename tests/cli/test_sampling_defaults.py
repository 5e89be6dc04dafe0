"""A model's own sampling (`runtime/sampling/model_defaults.py`) is used where nobody says otherwise, is said, and is
kept.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Rows = list[dict[str, Any]]


@pytest.fixture
def model(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    own = {"do_sample": True, "temperature": 1.5, "top_k": 40, "top_p": "wide", "eos_token_id": None}
    (folder / "generation_config.json").write_text(json.dumps(own))
    return folder


@pytest.fixture
def run(
    cli: Callable[..., int],
    model: Path,
    rows_file: Callable[[Path, Rows], Path],
    rows_of: Callable[[Path], Rows],
    tmp_path: Path,
) -> Callable[..., tuple[int, list[str]]]:
    rows = [{"id": "a", "prompt": "Hello", "max_tokens": 8}, {"id": "b", "prompt": "Hi", "max_tokens": 8, "top_k": 1}]
    source = rows_file(tmp_path / "in.jsonl", rows)

    def call(name: str, *options: object) -> tuple[int, list[str]]:
        out = tmp_path / f"{name}.jsonl"
        code = cli("batch", model, source, "-o", out, *options)
        return code, [row["text"] for row in rows_of(out)] if out.exists() else []

    return call


def test_a_models_own_sampling_is_used_and_said(
    run: Callable[..., tuple[int, list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (sampled, likeliest) = run("own", "--summary", tmp_path / "s.json")
    assert code == 0
    said = capsys.readouterr().err
    assert "sampling defaults from generation_config.json: temperature 1.5, top_k 40" in said
    assert "top_p 'wide' is ignored" in said
    kept = json.loads((tmp_path / "s.json").read_text())["model"]["generation_config"]
    assert kept == {"temperature": 1.5, "top_k": 40}
    code, (greedy, still) = run("greedy", "--temperature", 0)
    assert code == 0
    # A row's own value counts more than both.
    assert still == likeliest
    assert sampled != greedy
    assert "top_k 40 (--temperature" in capsys.readouterr().err


def test_the_journal_keeps_it(
    run: Callable[..., tuple[int, list[str]]], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("job", "--max-rows", 1)[0] not in (0, 2, 3)
    capsys.readouterr()
    assert run("job", "--temperature", 0)[0] != 0
    assert "temperature 1.5 -> 0.0" in capsys.readouterr().err
    assert run("job")[0] == 0
