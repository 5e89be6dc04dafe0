"""Tokenizer files, templates and settings of generation (`runtime/text/folder.py`, `runtime/text/tokenizer_trial.py`,
`runtime/sampling/model_defaults.py`) that lead elsewhere, or ask for the machine's memory.
"""

import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moedge.offload.errors import BadCheckpoint
from moedge.runtime.sampling.model_defaults import model_defaults
from moedge.runtime.settings.errors import PromptError, TokenizerError
from moedge.runtime.text.folder import SMALL_FILES, has_chat_template
from moedge.runtime.text.tokenizer import Tokenizer
from moedge.runtime.text.tokenizer_trial import check_parts


def linked(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def piped(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, elsewhere: Path) -> None:
    path.mkdir()


@pytest.fixture
def model(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model"))


@pytest.mark.parametrize("put", [linked, piped, folder])
@pytest.mark.parametrize("name", SMALL_FILES)
def test_a_file_that_leads_elsewhere_is_refused(name: str, put: Any, model: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (model / name).rename(elsewhere) if (model / name).exists() else elsewhere.write_text("{}")
    put(model / name, elsewhere)
    with pytest.raises(BadCheckpoint, match=f"{name} is a (link to .*elsewhere|folder, pipe or device), wanted a file"):
        Tokenizer.load(model)


def test_settings_of_generation_that_lead_elsewhere_are_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text('{"temperature": 1.5}')
    (model / "generation_config.json").unlink(missing_ok=True)
    (model / "generation_config.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadCheckpoint, match="link to"):
        model_defaults(model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadCheckpoint, match="link to"):
        has_chat_template(model)


def bomb(model: Path, **parts: Any) -> None:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, **parts}))


PIECE = {"SpecialToken": {"id": "x", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL = {"x": {"id": "x", "ids": [0] * 1000, "tokens": ["x"] * 1000}}
AROUND = {"type": "TemplateProcessing", "single": [TEXT, *[PIECE] * 10_000], "pair": [TEXT], "special_tokens": SPECIAL}
GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaa"}
BOMBS: dict[str, dict[str, Any]] = {
    "post-processor": {"post_processor": AROUND},
    "repeated text": {"post_processor": {**AROUND, "single": [TEXT] * 1000}},
    "post-processors in a sequence": {"post_processor": {"type": "Sequence", "processors": [AROUND] * 4}},
    "prepended": {"normalizer": {"type": "Prepend", "prepend": "a" * (1 << 20)}},
    "growing": {"normalizer": {"type": "Sequence", "normalizers": [GROWING] * 8}},
    "growing by pattern": {"normalizer": {**GROWING, "pattern": {"Regex": ""}, "content": "a" * 16}},
    "nested": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": []}] * 40}},
    "unknown normalizer": {"normalizer": {"type": "Evil"}},
    "unknown pre-tokenizer": {"pre_tokenizer": {"type": "Evil"}},
    "no object": {"normalizer": 7},
    "added": {"added_tokens": [
        {"id": index, "content": f"<{index}>", "special": True, "normalized": False, "lstrip": False, "rstrip": False,
         "single_word": False} for index in range(70_000)
    ]},
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_that_asks_for_much_is_refused(name: str, model: Path) -> None:
    bomb(model, **BOMBS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is refused: "):
        Tokenizer.load(model)
    # Of this process, in KiB; the one that tries it has a limit.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def test_a_tokenizer_that_is_large_is_not_read(model: Path) -> None:
    with (model / "tokenizer.json").open("ab") as file:
        file.truncate(200 << 20)
    with pytest.raises(BadCheckpoint, match="at most 67108864 are read"):
        Tokenizer.load(model)


VALUES = (None, -1, 1 << 40, 1e300, "", "a" * 10_000, "\x00", [], {}, [[]] * 100, {"type": "Sequence"}, True)


def mutated(content: Any, rng: random.Random) -> None:
    """One value inside, of any depth but not a token of the vocabulary, becomes another."""
    while True:
        at = rng.choice(list(content) if isinstance(content, dict) else range(len(content)))
        inner = content[at]
        if isinstance(inner, dict | list) and inner and at != "vocab" and rng.random() < 0.8:
            content = inner
            continue
        if rng.random() < 0.2 and isinstance(content, dict):
            del content[at]
        else:
            content[at] = rng.choice(VALUES)
        return


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(200))
def test_spoiled_tokenizers_are_refused_or_work(seed: int, model: Path) -> None:
    print(f"seed {seed}")
    rng, path = random.Random(seed), model / "tokenizer.json"
    content = json.loads(path.read_text())
    for _ in range(rng.choice((1, 1, 3))):
        mutated(content, rng)
    path.write_text(json.dumps(content))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with Tokenizer.load(model) as tokenizer:
            tokenizer.encode("a text of some words")
    except (TokenizerError, PromptError, BadCheckpoint) as error:
        print(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


@pytest.mark.parametrize("content", [
    {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}},
    {"post_processor": {"type": "TemplateProcessing", "single": [PIECE, TEXT, PIECE],
                        "special_tokens": {"x": {"id": "x", "ids": [1], "tokens": ["x"]}}}},
    {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]}},
])  # fmt: skip
def test_the_parts_of_published_tokenizers_are_taken(content: dict[str, Any]) -> None:
    check_parts(content)
