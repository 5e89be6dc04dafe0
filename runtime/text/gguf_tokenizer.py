"""Writes the tokenizer and chat template of a GGUF file as transformers does, from the file's metadata."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ...offload.checkpoint.gguf_file import GgufCheckpoint
from ...offload.checkpoint.header import described
from ..settings.errors import TokenizerError, require_transformers
from .gguf_words import WORDS, Words

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Older ones read the fields of a file wrongly: merges fall apart, special tokens get lost.
SINCE = "5.18"


def write_tokenizer(path: Path, folder: Path) -> None:
    """Writes the tokenizer's files into `folder`; none where the GGUF file has no vocabulary.

    Raises TokenizerError for a kind of tokenizer that transformers does not build, OldTransformers, BadCheckpoint.
    """
    # Read by the strict reader first: transformers trusts the counts of a file.
    with GgufCheckpoint(path) as checkpoint:
        if "tokenizer.ggml.tokens" not in checkpoint.metadata:
            return
        prefixed = checkpoint.metadata.get("tokenizer.ggml.add_space_prefix") is not False
        kind = checkpoint.metadata.get("tokenizer.ggml.pre", "default")
        words = _words(path, kind) if checkpoint.metadata.get("tokenizer.ggml.model") == "gpt2" else None
    require_transformers(SINCE, f"the tokenizer of {path}")
    # A tokenizer's files beside the GGUF file may be another model's: it is read from a folder of its own.
    with tempfile.TemporaryDirectory(prefix="moedge-") as alone:
        Path(alone, path.name).symlink_to(path.resolve())
        _convert(Path(alone, path.name), folder, path, prefixed, words)


def _words(path: Path, kind: object) -> Words:
    if not isinstance(kind, str) or kind not in WORDS:
        raise TokenizerError(
            f"{path}: tokenizer.ggml.pre is {described(kind)}, a way to split text that is not known here; use the "
            "checkpoint that the file was made from"
        )
    return WORDS[kind]


def _convert(link: Path, folder: Path, path: Path, prefixed: bool, words: Words | None) -> None:
    # AutoTokenizer would build a configuration first, which fails for some families.
    from transformers import PreTrainedTokenizerFast

    # Its parts raise whatever they stumble over.
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(link.parent), gguf_file=link.name, local_files_only=True
        )
        if not prefixed:
            _without_prefix(tokenizer.backend_tokenizer)
        if words is not None:
            _split(tokenizer.backend_tokenizer, words)
        tokenizer.save_pretrained(folder)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise TokenizerError(
            f"transformers cannot build the tokenizer of {path} ({type(error).__name__}: {reason}); use the checkpoint "
            "that the file was made from"
        ) from error


def _split(backend: Backend, words: Words) -> None:
    """Splits text as the merges were learned; transformers knows some ways alone, and takes GPT-2's for the others."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in words.patterns]
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.then_gpt2)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, own])
    backend.model.ignore_merges = words.whole
    if words.composed:
        backend.normalizer = normalizers.NFC()


def _without_prefix(backend: Backend) -> None:
    """Takes away the space that SentencePiece's tokenizers put before a text; transformers overlooks that field."""
    from tokenizers import decoders, pre_tokenizers

    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer.prepend_scheme = "never"
        # LlamaTokenizer's decoder, less the step that takes a space from the beginning of a text.
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
