"""A rendered chat is cut into pieces: what only imitates a control token is literal (`runtime/text/template.py`)."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from moedge.runtime.settings.errors import TemplateError
from moedge.runtime.text.control_tokens import ControlTokens, Piece
from moedge.runtime.text.template import ChatTemplate

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture
def made() -> Iterator[Any]:
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate("abc<>|")}, []))
    backend.add_special_tokens(["<|end|>"])
    backend.add_tokens(["<think>"])
    open_templates: list[ChatTemplate] = []

    def make(source: str) -> ChatTemplate:
        controls = ControlTokens(backend, "<think>", None)
        open_templates.append(ChatTemplate(source, {}, controls, datetime.now()))
        return open_templates[-1]

    yield make
    for template in open_templates:
        template.close()


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_a_prompt_without_imitations_is_one_piece(made: Any) -> None:
    assert made(PLAIN).pieces(user(" a <b| ")) == [Piece("<|user|>a <b|", False)]


def test_an_imitation_is_a_literal_piece_and_the_templates_own_token_is_not(made: Any) -> None:
    pieces = made(PLAIN + "<|end|>").pieces(user("a<|end|>b"))
    assert pieces == [Piece("<|user|>a", False), Piece("<|end|>", True), Piece("b<|end|>", False)]


def test_parts_go_to_a_template_that_takes_them_and_as_lines_to_one_that_does_not(made: Any) -> None:
    assert made(EITHER).pieces(user(parts("a", "b"))) == [Piece("(a)(b)", False)]
    assert made(PLAIN).pieces(user(parts("a", "b"))) == [Piece("<|user|>a\nb", False)]


def test_a_template_that_fails_on_parts_is_given_lines(made: Any) -> None:
    source = "{% if messages[0].content is not string %}{{ raise_exception('text only') }}{% endif %}" + PLAIN
    assert made(source).pieces(user(parts("a", "b"))) == [Piece("<|user|>a\nb", False)]
    with pytest.raises(TemplateError, match="text only"):
        made("{{ raise_exception('text only') }}").pieces(user(parts("a")))


@pytest.mark.parametrize("cut", range(1, 7))
def test_neighbouring_texts_cannot_join_into_a_control_token(made: Any, cut: int) -> None:
    bare = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    template = made(bare + "{{ part.text }}{% endfor %}{% endif %}{% endfor %}")
    first, second = "<|end|>"[:cut], "<|end|>"[cut:]
    for messages in (
        user(parts(first, second)),
        [*user(first), *user(second)],
        [*user(parts("a", first)), *user(second)],
    ):
        pieces = template.pieces(messages)
        assert "".join(piece.text for piece in pieces).endswith("<|end|>")
        assert not any("<|end|>" in piece.text for piece in pieces)


def test_the_halves_of_an_imitation_that_the_template_cuts_stay_apart(made: Any) -> None:
    template = made("{% set halves = messages[0].content.split('en') %}{{ halves[1] }}{{ halves[0] }}")
    assert template.pieces(user("<|end|>")) == [Piece("d|>", False), Piece("<|", False)]


def test_text_that_the_template_deletes_joins_nothing(made: Any) -> None:
    template = made("{{ messages[0].content.replace('<|end|>', '') }}")
    assert template.pieces(user("<|e<|end|>nd|>")) == [Piece("<|e", False), Piece("nd|>", False)]


@pytest.mark.parametrize(
    ("role", "text", "literal"),
    [("user", "<think>", True), ("assistant", "<think>", False), ("assistant", "<|end|>", True)],
)
def test_only_a_models_own_ordinary_tokens_are_left_to_it(made: Any, role: str, text: str, literal: bool) -> None:
    pieces = made("{{ messages[1].content }}").pieces([*user("a"), {"role": role, "content": text}])
    assert pieces == [Piece(text, literal)]
