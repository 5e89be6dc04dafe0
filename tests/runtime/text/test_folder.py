import contextlib
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from moedge.runtime.settings.errors import TokenizerError
from moedge.runtime.text.tokenizer import Tokenizer


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders["byte_level"], tmp_path / "model"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match="no tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tiktoken.model", b"IQ== 0\n"),
        ("qwen.tiktoken", b"IQ== 0\n"),
        ("tokenizer.model", b"IQ== 0\n"),
        ("tekken.json", b"{}"),
    ],
)
def test_tokens_without_the_rule_that_cuts_texts_are_refused(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=f"{name} alone: such files list tokens.*fetch a tokenizer.json"):
        Tokenizer.load(tmp_path)


def test_a_sentencepiece_model_without_its_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>")
    monkeypatch.setattr("moedge.runtime.text.folder.find_spec", lambda module: None)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model alone, which sentencepiece and protobuf must"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "BPE"}}', "\x00\x01"])
def test_a_broken_tokenizer_is_refused(copy: Path, content: str) -> None:
    (copy / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="complete"):
        Tokenizer.load(copy)


def test_code_in_the_folder_is_never_run(copy: Path, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    (copy / "evil.py").write_text(f"open({str(witness)!r}, 'w')\nclass Evil: pass\n")
    edit(
        copy / "tokenizer_config.json",
        lambda config: config.update(auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]}),
    )
    with contextlib.suppress(TokenizerError):
        Tokenizer.load(copy).close()
    assert not witness.exists()


def test_loading_opens_no_connection(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))
    Tokenizer.load(copy).close()


def test_settings_that_would_alter_texts_are_switched_off(copy: Path) -> None:
    with Tokenizer.load(copy) as tokenizer:
        expected = tokenizer.encode("a long text " * 9)
        chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    backend = Backend.from_file(str(copy / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_id=0, pad_token="!")
    backend.save(str(copy / "tokenizer.json"))
    edit(copy / "tokenizer_config.json", lambda config: config.update(split_special_tokens=True))
    with Tokenizer.load(copy) as tokenizer:
        assert tokenizer.encode("a long text " * 9) == expected
        assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == chat


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, None, (402,)),
        ([7, 400], [9], (7, 400, 402)),
        (7, 9, (7, 402)),
        (None, 9, (9, 402)),
        (None, [9, 8], (8, 9, 402)),
    ],
)
def test_what_ends_an_answer_is_as_in_transformers(
    copy: Path, generation: Any, config: Any, expected: tuple[int, ...]
) -> None:
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (copy / name).write_text(json.dumps({"eos_token_id": value}))
    with Tokenizer.load(copy) as tokenizer:
        assert tokenizer.eos_token_ids == expected


@pytest.mark.parametrize("value", ["2", 2.0, True, -1, [1, None], {"a": 1}])
def test_an_end_that_is_no_token_id_is_refused(copy: Path, value: Any) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(TokenizerError, match="eos_token_id"):
        Tokenizer.load(copy)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000])
def test_a_broken_generation_config_is_refused(copy: Path, content: str) -> None:
    (copy / "generation_config.json").write_text(content)
    with pytest.raises(TokenizerError, match="generation_config"):
        Tokenizer.load(copy)


def test_a_giant_template_is_refused(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("{# #}" * 300_000)
    with pytest.raises(TokenizerError, match="chat template of"):
        Tokenizer.load(copy)


def test_a_tokenizer_that_reads_control_tokens_in_text_is_refused(copy: Path) -> None:
    backend = Backend(models.Unigram([("<unk>", 0.0), ("</s>", -1.0), ("a", -2.0), ("▁", -2.0)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.save(str(copy / "tokenizer.json"))
    edit(
        copy / "tokenizer_config.json",
        lambda config: config.update(bos_token="</s>", eos_token="</s>", unk_token="<unk>"),
    )
    with pytest.raises(TokenizerError, match="</s>"):
        Tokenizer.load(copy)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
    ],
)
def test_a_decoder_that_does_not_work_token_by_token_is_refused(copy: Path, decoder: Any) -> None:
    backend = Backend.from_file(str(copy / "tokenizer.json"))
    backend.decoder = decoder
    backend.save(str(copy / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="decoder"):
        Tokenizer.load(copy)
