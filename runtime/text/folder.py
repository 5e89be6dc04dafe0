"""Reads the tokenizer and chat template of a model folder. The only file that imports transformers; runs no code."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...offload.checkpoint.checkpoint import find_inside
from ..settings.errors import TokenizerError
from .tokenizer_trial import MAX_NBYTES, try_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SENTENCEPIECE = "tokenizer.model"
# What transformers converts it with: a package, and its module.
_READERS = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
# Tokens with their ranks, for tiktoken and for mistral-common.
_RANKS = re.compile(r"tiktoken|tekken.*\.json$")
_MAX_JSON_NBYTES = 4 << 20
# The files that a tokenizer is made of, and the most bytes of each.
SMALL_FILES = {
    **dict.fromkeys(("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"), MAX_NBYTES),
    **dict.fromkeys(("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
                     "chat_template.jinja", "chat_template.json"), _MAX_JSON_NBYTES),
}  # fmt: skip
_MAX_TEMPLATE_LENGTH = 1 << 20


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """A tokenizer's parts; `template` is None for a model without chat format."""

    backend: Tokenizer
    template: str | None
    special_tokens: dict[str, Any]
    unknown_id: int | None
    eos_token_ids: tuple[int, ...]


def read_folder(folder: Path) -> TokenizerFolder:
    """Raises `TokenizerError` when `folder` has no tokenizer, or one that only its own code or no fast one can read;
    `BadCheckpoint` for files that are links to elsewhere, pipes or devices."""
    # transformers follows links, and reads what it finds: it gets copies of the files that it may read.
    with tempfile.TemporaryDirectory(prefix="moedge-") as copied:
        for name, most in SMALL_FILES.items():
            if (data := find_inside(folder, name, most)) is not None:
                if name == "tokenizer.json":
                    try_tokenizer(data)
                Path(copied, name).write_bytes(data)
        return _read(Path(copied), folder)


def _read(copied: Path, folder: Path) -> TokenizerFolder:
    _check_files(copied, folder)
    from tokenizers import Tokenizer

    tokenizer = _load(copied, folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TokenizerError(
            f"{folder} has a tokenizer of class {type(tokenizer).__name__}, which the tokenizers library does not run; "
            "use a checkpoint with a tokenizer.json."
        )
    # All three can be switched on by the checkpoint; each would change or cut texts without a word.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return TokenizerFolder(
        backend=backend,
        template=_template(tokenizer, folder),
        special_tokens=dict(tokenizer.special_tokens_map),
        unknown_id=tokenizer.unk_token_id,
        eos_token_ids=tuple(sorted({*_eos_ids(copied), *_as_ids(tokenizer.eos_token_id, folder)})),
    )


def _check_files(copied: Path, folder: Path) -> None:
    """Raises `TokenizerError` for what transformers cannot read, or would read otherwise than the model was trained."""
    present = [name for name in _TOKENIZER_FILES if (copied / name).is_file()]
    if present[:1] == [_SENTENCEPIECE] and _is_sentencepiece(copied / _SENTENCEPIECE):
        missing = [library for library, module in _READERS.items() if not _is_installed(module)]
        if missing:
            raise TokenizerError(
                f"{folder} has its tokenizer as {_SENTENCEPIECE} alone, which {' and '.join(missing)} must read first; "
                "use pip install sentencepiece protobuf, or fetch a tokenizer.json."
            )
        return
    if present and present[0] != _SENTENCEPIECE:
        return
    others = sorted(each.name for each in folder.iterdir() if each.is_file() and _RANKS.search(each.name))
    if found := [*present, *others]:
        raise TokenizerError(
            f"{folder} has its tokenizer as {', '.join(found)} alone: such files list tokens, but not how a text is "
            "cut before tokens are looked up, which is in the model's own code; fetch a tokenizer.json of this model."
        )
    raise TokenizerError(
        f"{folder} has no tokenizer: one of {', '.join(_TOKENIZER_FILES)} is needed; fetch the checkpoint's "
        "tokenizer files into it."
    )


def _is_sentencepiece(path: Path) -> bool:
    """Whether a file is SentencePiece's, and not a list of tokens in base64 with their ranks, as tiktoken reads."""
    with path.open("rb") as file:
        # The tag of a message's first field, which holds the first token.
        return file.read(1) == b"\n"


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def has_chat_template(folder: Path) -> bool:
    """Whether the model was made for conversations, by its small files alone."""
    if any(os.path.lexists(folder / name) for name in ("chat_template.jinja", "chat_template.json")):
        return True
    name = "tokenizer_config.json"
    data = find_inside(folder, name, SMALL_FILES[name])
    return data is not None and bool(_json(folder / name, data).get("chat_template"))


def _load(copied: Path, folder: Path) -> Any:
    from transformers import AutoTokenizer

    # The parser of tokenizer.json raises bare exceptions.
    try:
        return AutoTokenizer.from_pretrained(str(copied), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise TokenizerError(
            f"transformers cannot read the tokenizer in {folder} ({type(error).__name__}: {str(error)[:300]}); "
            "check that its files are complete."
        ) from error


def _template(tokenizer: Any, folder: Path) -> str | None:
    template: str | dict[str, str] | None = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and len(template) > _MAX_TEMPLATE_LENGTH:
        raise TokenizerError(
            f"{folder} has a chat template of {len(template)} characters, at most {_MAX_TEMPLATE_LENGTH} are accepted; "
            "use a checkpoint with another template."
        )
    return template


def _eos_ids(folder: Path) -> Iterator[int]:
    """The tokens that end an answer, from generation_config.json or else config.json, as in transformers."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            content = _json(path, path.read_bytes())
            inner = content.get("text_config")
            # A model that also sees or hears has the configuration of its text model inside its own.
            given = content.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
            yield from _as_ids(given, path)
            return


def _as_ids(value: Any, source: Path) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise TokenizerError(
            f"{source} gives {value!r} as eos_token_id; a token id or a list of them is needed: fix it."
        )
    return ids


def _json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON ({error}); fetch it again.") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} holds a {type(content).__name__}, an object is needed; fetch it again.")
    return content
