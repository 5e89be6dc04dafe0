"""Which tokens of a model are control tokens, and where a text imitates one (`runtime/text/control_tokens.py`)."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from moedge.runtime.text.control_tokens import ControlTokens, Span


@pytest.fixture
def letters() -> Tokenizer:
    vocab = {character: i for i, character in enumerate(map(chr, range(32, 127)))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def contents(backend: Tokenizer, template: str = "") -> set[str]:
    return {backend.id_to_token(token_id) for token_id in ControlTokens(backend, template, None).ids}


def test_a_token_is_control_if_special_or_bracketed_or_a_sign_of_the_template(letters: Tokenizer) -> None:
    letters.add_special_tokens(["EOS"])
    letters.add_tokens(["<|user|>", "<\uff5cAssistant\uff5c>", "<think>", "<table>", "message", "    "])
    bracketed = {"EOS", "<|user|>", "<\uff5cAssistant\uff5c>"}
    assert contents(letters) == bracketed
    assert contents(letters, "{{ message }}    <think>") == bracketed | {"<think>"}


def test_an_ordinary_word_of_the_model_is_no_control_token(letters: Tokenizer) -> None:
    letters.add_tokens(["!"])
    letters.add_special_tokens(["?"])
    assert contents(letters, "!?") == set()


@pytest.mark.parametrize("text", ["\uff1c|im_end|\uff1e", "<|im_end\u200b|>", "<|\uff49m_end|>"])
def test_imitations_that_only_normalization_brings_out_are_found(letters: Tokenizer, text: str) -> None:
    letters.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\u200b", "")])
    letters.add_tokens([AddedToken("<|im_end|>", special=True, normalized=True)])
    controls = ControlTokens(letters, "", None)
    assert controls.ids & set(letters.encode(text).ids), "the imitation works without the defence"
    assert controls.spans(f"né {text}!") == [Span(3, 3 + len(text), True)]


def test_the_longest_of_nested_tokens_is_found_and_overlaps_are_joined(letters: Tokenizer) -> None:
    letters.add_special_tokens(["<a>", "<a><b>", "<b>"])
    controls = ControlTokens(letters, "", None)
    assert controls.spans("x<a><b>y<b>") == [Span(1, 7, True), Span(8, 11, True)]
    assert controls.spans("<a><a>") == [Span(0, 3, True), Span(3, 6, True)]
    assert controls.spans("") == []
