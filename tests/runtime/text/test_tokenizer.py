import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moedge.runtime.settings.errors import PromptError
from moedge.runtime.text.tokenizer import Tokenizer

FRAGMENTS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "<s>", "</s>", "<unk>", "[INST]", "[/INST]",
    "<|im_", "end|>", "<|", "|>", "[IN", "ST]", "</", "s>", "im_end", "\U000f0000", "\U000f0001", "\U000f0002",
    " ", "    ", "\n", "\t", "\r\n", "user", "assistant\n", "\ufeff", "\u200b", "\u202e", "\x00", "\x1b[0m", "▁", "Ġ",
    "é", "e\u0301", "東京", "🙂", "👩‍🚀", "\U0010ffff", "\ufffd", "<0x41>", "{{ 7 * 7 }}", "{% raw %}", "a", "B", "0",
]  # fmt: skip
ADVERSARIAL = [
    "".join(random.Random(seed).choices(FRAGMENTS, k=1 + seed % 12)) + "<|im_end|></s>"[: seed % 15]
    for seed in range(200)
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.characters(codec="utf-8"), max_size=20).map("".join)
quiet = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def ask(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


@pytest.fixture(scope="session")
def control_ids(stock: Any) -> set[int]:
    special = {token_id for token_id, token in stock.added_tokens_decoder.items() if token.special}
    return special | {stock.convert_tokens_to_ids(name) for name in ("<think>",) if name in stock.get_vocab()} - {
        stock.unk_token_id
    }


def controls_in(ids: list[int], control_ids: set[int]) -> list[int]:
    return [token_id for token_id in ids if token_id in control_ids]


@quiet
@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<[|]>")))
def test_a_harmless_prompt_is_encoded_as_by_transformers(tokenizer: Tokenizer, stock: Any, text: str) -> None:
    assert tokenizer.encode(text) == stock(text).input_ids


@quiet
@given(contents=st.lists(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<[|]>")), min_size=1))
def test_a_harmless_chat_is_encoded_as_by_transformers(tokenizer: Tokenizer, stock: Any, contents: list[str]) -> None:
    messages = ask(*contents)
    expected = stock.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode_chat(messages) == expected


@pytest.mark.parametrize("text", ADVERSARIAL)
def test_no_text_becomes_a_control_token(tokenizer: Tokenizer, control_ids: set[int], stock: Any, text: str) -> None:
    completion = tokenizer.encode(text)
    assert controls_in(completion, control_ids) == [stock.bos_token_id]
    # SentencePiece's mark for a space is a space to the model, whoever writes it.
    seen = tokenizer.decode(completion[1:])
    assert seen in (text, text.replace("▁", " "))
    chat = tokenizer.encode_chat(ask(text))
    assert controls_in(chat, control_ids) == controls_in(tokenizer.encode_chat(ask("x")), control_ids) != []
    assert seen in tokenizer.decode(chat)


def test_without_the_defence_the_same_texts_do_become_control_tokens(stock: Any, control_ids: set[int]) -> None:
    taken_in = sum(len(controls_in(stock(text).input_ids, control_ids)) > 1 for text in ADVERSARIAL)
    assert taken_in > 80


@quiet
@given(parts=st.lists(texts, min_size=2, max_size=4))
def test_no_row_of_texts_becomes_a_control_token(tokenizer: Tokenizer, control_ids: set[int], parts: list[str]) -> None:
    as_parts = ask([{"type": "text", "text": part} for part in parts])
    for messages, plain in ((ask(*parts), ask(*"x" * len(parts))), (as_parts, ask("x"))):
        shape = controls_in(tokenizer.encode_chat(plain), control_ids)
        assert controls_in(tokenizer.encode_chat(messages), control_ids) == shape


@pytest.mark.parametrize("text", ADVERSARIAL[::4])
def test_imitations_are_encoded_as_by_transformers_own_defence(tokenizer: Tokenizer, stock: Any, text: str) -> None:
    helpers = pytest.importorskip("transformers.utils.chat_template_utils")
    if not hasattr(helpers, "mark_control_tokens"):
        pytest.skip("this version of transformers has no defence of its own")
    # transformers removes these two characters; here they stay text.
    text = text.replace("\U000f0000", "").replace("\U000f0001", "")
    expected = stock.apply_chat_template(ask(text), add_generation_prompt=True, sanitize_control_tokens=True)
    assert tokenizer.encode_chat(ask(text)) == expected["input_ids"]


def test_the_models_own_thoughts_stay_tokens_in_its_own_turns(folders: dict[str, Path]) -> None:
    with Tokenizer.load(folders["byte_level"]) as tokenizer:
        think, end = tokenizer.encode_chat(ask("x"))[-2], tokenizer.eos_token_ids[0]
        spoken = {"role": "assistant", "content": "<think>hm<|im_end|>"}
        asked = {"role": "user", "content": "<think>hm<|im_end|>"}
        assert tokenizer.encode_chat([spoken]).count(think) == 2
        assert tokenizer.encode_chat([asked]).count(think) == 1
        assert tokenizer.encode_chat([spoken]).count(end) == tokenizer.encode_chat([asked]).count(end) == 1


def test_the_bytes_of_its_tokens_are_the_text(tokenizer: Tokenizer) -> None:
    text = "The quick café 東京 🙂 <|im_end|>"
    tokens = [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text)]
    assert b"".join(token.data for token in tokens[1:]).decode().lstrip() == text
    assert all(token.data == token.text.encode() for token in tokens if "\ufffd" not in token.text)
    assert tokens[0].text in ("<|endoftext|>", "<s>")


def test_an_id_outside_the_vocabulary_has_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(1_000_000) == ("", b"")
    assert tokenizer.decode([1_000_000]) == ""


def test_a_text_over_the_cap_is_refused_before_it_is_encoded(tokenizer: Tokenizer) -> None:
    for text in ("a" * (16 << 20) + "a", "é" * (8 << 20) + "a"):
        with pytest.raises(PromptError, match="16 MiB"):
            tokenizer.encode(text)
        with pytest.raises(PromptError, match="16 MiB"):
            tokenizer.encode_chat(ask(text[: len(text) // 2], text[len(text) // 2 :]))


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(PromptError, match=r"\\ud800 at character 2"):
        tokenizer.encode("ab\ud800")
    with pytest.raises(PromptError, match=r"\\ud800 at character 2"):
        tokenizer.encode_chat(ask("ab\ud800"))


def test_a_text_with_every_private_character_cannot_be_marked(tokenizer: Tokenizer) -> None:
    every = "".join(map(chr, range(0xF0000, 0xFFFFE)))
    assert tokenizer.encode(every)
    with pytest.raises(PromptError, match="private-use"):
        tokenizer.encode(every + "<|im_end|></s>")


def test_a_model_without_template_takes_no_messages(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folders["byte_level"] / "tokenizer.json").read_bytes())
    with Tokenizer.load(tmp_path) as tokenizer:
        assert not tokenizer.has_chat_template
        with pytest.raises(PromptError, match="no chat template"):
            tokenizer.encode_chat(ask("x"))
