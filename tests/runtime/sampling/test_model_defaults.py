"""What a model's generation_config.json may set, and what is not taken from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from moedge.runtime.sampling.model_defaults import model_defaults


def of(folder: Path, content: Any) -> Any:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return model_defaults(folder)


def test_values_are_taken_by_their_names(tmp_path: Path) -> None:
    found = of(tmp_path, {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 9})
    assert dict(found.values) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert str(found) == "temperature 0.6, top_p 0.95, top_k 20"
    assert found.ignored == ()
    assert dict(found.only({"top_k"}).values) == {"top_k": 20}


@pytest.mark.parametrize(
    ("content", "temperature"),
    [
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"temperature": 0.6}, 0.6),
        ({"top_p": 0.9}, None),
        ({}, None),
    ],
)
def test_sampling_is_on_where_the_file_says_so(
    tmp_path: Path, content: dict[str, Any], temperature: float | None
) -> None:
    assert of(tmp_path, content).values.get("temperature") == temperature


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"), ("temperature", -1), ("temperature", True), ("temperature", [0.5]),
        ("temperature", 10**400), ("top_k", 1.5), ("top_k", -2), ("top_k", 10**30), ("top_p", 0), ("top_p", 1.01),
        ("min_p", -0.1), ("repetition_penalty", 0), ("repetition_penalty", {"a": 1}),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_ignored_in_words(tmp_path: Path, name: str, value: Any) -> None:
    found = of(tmp_path, {name: value})
    assert dict(found.values) == {}
    (words,) = found.ignored
    assert words.startswith(f"generation_config.json: {name} ")
    assert len(words) < 200


@pytest.mark.parametrize("text", ["", "[]", "{", '{"temperature": NaN}', '{"temperature": 1e999}', "[" * 100_000])
def test_a_hostile_file_sets_nothing(tmp_path: Path, text: str) -> None:
    assert dict(of(tmp_path, text).values) == {}


def test_off_is_written_as_minus_one_or_null(tmp_path: Path) -> None:
    assert dict(of(tmp_path, {"top_k": -1, "top_p": None}).values) == {"top_k": 0}
    assert dict(model_defaults(tmp_path / "absent").values) == {}
