import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from moedge.runtime.text.stream import TextStream, decoding

quiet = settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
TEXT = "The quick brown fox — 東京 🙂 naïve <0x41> ends here."


class Characters:
    """A detokenizer whose tokens are code points."""

    open = rest = ""

    def push(self, token_id: int) -> str:
        return chr(token_id)


class Chunks:
    """A detokenizer whose token i is the i-th of some strings."""

    open = rest = ""

    def __init__(self, chunks: list[str]) -> None:
        self._chunks = chunks

    def push(self, token_id: int) -> str:
        return self._chunks[token_id]


def fed(stream: TextStream, ids: list[int], take_every: int = 1) -> str:
    """Feeds all ids and returns what was taken, finally all of it."""
    taken = ""
    for count, token_id in enumerate(ids):
        stream.append(token_id)
        if count % take_every == 0:
            taken += stream.take()
    stream.finish()
    return taken + stream.take()


DECODERS = {
    "byte_level": None,
    "metaspace": None,
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "no fallback": decoders.Sequence([decoders.Replace("▁", " ")]),
    "unigram": decoders.Metaspace(),
    "unigram, no prefix": decoders.Metaspace(prepend_scheme="never"),
}


@pytest.fixture(params=DECODERS)
def any_backend(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Backend:
    folder = folders["byte_level" if request.param == "byte_level" else "metaspace"]
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    if DECODERS[request.param] is not None:
        backend.decoder = DECODERS[request.param]
    return backend


@quiet
@given(data=st.data())
def test_text_and_all_that_is_taken_equal_decoding_at_once(any_backend: Backend, data: st.DataObject) -> None:
    size = any_backend.get_vocab_size() + 3
    # Bytes stand in the first half of both vocabularies; runs of them are the hard case.
    ids = data.draw(st.lists(st.integers(0, size) | st.integers(5, 260), max_size=40))
    stream = TextStream(decoding(any_backend).detokenizer())
    for end, token_id in enumerate(ids):
        stream.append(token_id)
        if data.draw(st.booleans()):
            assert stream.text == any_backend.decode(ids[: end + 1])
    rest = fed(stream, [])
    assert stream.text == rest == any_backend.decode(ids)


@quiet
@given(data=st.data(), text=st.text(st.sampled_from("aé東🙂👩\u200d ▁\ufffd")))
def test_what_is_taken_is_never_taken_back(any_backend: Backend, data: st.DataObject, text: str) -> None:
    ids = any_backend.encode(text, add_special_tokens=False).ids
    stream = TextStream(decoding(any_backend).detokenizer())
    taken = ""
    for token_id in ids:
        stream.append(token_id)
        taken += stream.take()
        assert any_backend.decode(ids).startswith(taken)
        assert stream.text.startswith(taken)


def test_a_character_is_taken_whole(backend: Backend) -> None:
    ids = backend.encode("🙂 x", add_special_tokens=False).ids
    stream = TextStream(decoding(backend).detokenizer())
    pieces = []
    for token_id in ids:
        stream.append(token_id)
        pieces.append(stream.take())
    assert "".join(pieces) == "🙂 x"
    assert sum("🙂" in piece for piece in pieces) == 1
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["T", "The", "he q", "fox —", "東京", "京 🙂", "🙂", "naïve <0x", "here.", "."])
def test_a_text_ends_before_its_stop_string(backend: Backend, stop: str) -> None:
    ids = backend.encode(TEXT, add_special_tokens=False).ids
    stream = TextStream(decoding(backend).detokenizer(), [stop, "never there"])
    taken = fed(stream, ids)
    assert stream.stopped
    assert stream.text == taken == TEXT[: TEXT.index(stop)]


def test_without_its_stop_string_a_text_goes_on(backend: Backend) -> None:
    ids = backend.encode(TEXT, add_special_tokens=False).ids
    stream = TextStream(decoding(backend).detokenizer(), ["here.x", "thE", "\ufffd", "🙂🙂"])
    assert fed(stream, ids) == stream.text == TEXT
    assert not stream.stopped


def test_a_stop_string_is_seen_with_the_token_that_completes_it(backend: Backend) -> None:
    ids = backend.encode("ab 🙂", add_special_tokens=False).ids
    stream = TextStream(decoding(backend).detokenizer(), ["🙂"])
    for token_id in ids:
        assert not stream.stopped
        stream.append(token_id)
    assert stream.stopped
    assert stream.text == "ab "


small = st.text(st.sampled_from("ab"), max_size=4)
stop_strings = st.lists(st.text(st.sampled_from("ab"), min_size=1, max_size=5), max_size=3)


def first_complete(text: str, stops: list[str]) -> int | None:
    """The cut by definition: one character after the other, the longest stop string that is complete there."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end - max(map(len, complete))
    return None


@settings(quiet, max_examples=300)
@given(
    chunks=st.lists(small, max_size=10),
    stops=stop_strings,
    take_every=st.integers(1, 4),
)
def test_the_cut_does_not_depend_on_tokens_nor_on_taking(chunks: list[str], stops: list[str], take_every: int) -> None:
    text = "".join(chunks)
    stream = TextStream(Chunks(chunks), stops)
    taken = fed(stream, list(range(len(chunks))), take_every)
    cut = first_complete(text, stops)
    assert stream.stopped == (cut is not None)
    assert stream.text == taken == text[:cut]


@quiet
@given(chunks=st.lists(small, max_size=10), stops=stop_strings)
def test_only_what_may_become_a_stop_string_is_held_back(chunks: list[str], stops: list[str]) -> None:
    stream = TextStream(Chunks(chunks), stops)
    taken = ""
    for token_id in range(len(chunks)):
        stream.append(token_id)
        taken += stream.take()
        if not stream.stopped:
            held = stream.text[len(taken) :]
            assert held == "" or any(stop.startswith(held) for stop in stops)


def test_tokens_after_the_end_add_nothing() -> None:
    stopped, finished = TextStream(Characters(), ["b"]), TextStream(Characters())
    for character in "abc":
        stopped.append(ord(character))
    finished.append(ord("a"))
    finished.finish()
    finished.append(ord("b"))
    assert stopped.text == finished.text == "a"


def test_a_long_stream_is_exact_and_looks_only_at_its_end(backend: Backend) -> None:
    ids = random.Random(0).choices(range(backend.get_vocab_size()), k=60_000)
    stream = TextStream(decoding(backend).detokenizer(), ["never there", "nor there"])
    taken = [stream.take() for token_id in ids if stream.append(token_id) is None]
    stream.finish()
    assert "".join(taken) + stream.take() == stream.text == backend.decode(ids)
