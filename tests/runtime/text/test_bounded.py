"""Patterns that explode cost a row or are refused (`runtime/text/control_tokens.py`); they do not hold a job up."""

import threading
import time
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from moedge.runtime.settings.errors import PromptError, TokenizerError
from moedge.runtime.text import control_tokens as bounded
from moedge.runtime.text.control_tokens import PlainText, bounded_encoding, within
from moedge.runtime.text.stream import decoding

# Every attempt stays below the library's own limit, and there is one for every character.
SLOW, SLOW_TEXT = r"(?=(?:a|aa|aaa){1,13}X)b", ("a" * 14 + "c") * 600
EXPLODING, EXPLODING_TEXT = r"(a+)+$", "a" * 40 + "b"


def tokenizer(pattern: str) -> Tokenizer:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return backend


def test_a_pattern_that_gives_up_costs_the_row() -> None:
    with pytest.raises(PromptError, match="gave up on this text"):
        bounded_encoding(tokenizer(EXPLODING), EXPLODING_TEXT)


@pytest.mark.parametrize("place", ["pre-tokenizer", "normalizer", "plain text"])
def test_a_pattern_that_takes_too_long_is_refused(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "ENCODE_LIMIT_S", 0.02)
    backend = tokenizer(SLOW)
    if place == "normalizer":
        backend.normalizer = normalizers.Replace(Regex(SLOW), "c")
    with pytest.raises(TokenizerError, match=r"more than 0\.02 s on one text"):
        PlainText(backend).ids(SLOW_TEXT) if place == "plain text" else bounded_encoding(backend, SLOW_TEXT)


def test_the_library_releases_the_lock_meanwhile() -> None:
    """The day this fails, no limit is kept: a match that holds Python's lock cannot be timed from Python."""
    ticks = 0

    def work() -> None:
        tokenizer(SLOW).encode_batch([SLOW_TEXT])

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        ticks += 1
        time.sleep(0.001)
    assert ticks > 10


def test_results_and_errors_come_through() -> None:
    assert within(10, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        within(10, lambda: 1 // 0)


def test_an_encoding_is_that_of_the_library(tmp_path: Path) -> None:
    backend = tokenizer("b")
    assert bounded_encoding(backend, "aabca").ids == backend.encode("aabca").ids == PlainText(backend).ids("aabca")


def test_a_decoder_with_a_pattern_is_refused() -> None:
    backend = tokenizer("b")
    backend.decoder = decoders.Sequence([decoders.Replace(Regex(EXPLODING), "c"), decoders.Fuse()])
    with pytest.raises(TokenizerError, match="replaces by a pattern"):
        decoding(backend)
