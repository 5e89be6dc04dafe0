"""Templates render as in transformers; no namespace takes underscored names (`runtime/text/template_worker.py`)."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from moedge.runtime.text.template_worker import template_environment

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))


def turns(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in pairs]


PART = [{"type": "text", "text": " a part "}]
CONVERSATIONS = [
    turns(("user", "Hi")),
    turns(
        ("system", "Be <b>brief</b> & 'kind'. "), ("user", "  Grüße\n\n"), ("assistant", " Yes. "), ("user", "東京?")
    ),
    turns(("user", "1"), ("assistant", "<think>\nhm\n</think>\n\nno"), ("user", "2"), ("assistant", "x</think>y")),
    turns(("user", "1"), ("user", "2"), ("user", "3"), ("user", "4")),
    turns(("assistant", "first"), ("tool", "{}")),
    turns(("system", PART), ("user", PART)),
]


def outcome(render: Any) -> str:
    try:
        return str(render())
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_templates_render_as_in_transformers(path: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = path.read_text()
    template = template_environment(datetime.now()).from_string(source)
    texts = []
    for messages in CONVERSATIONS:
        values = {"tools": None, "documents": None, "add_generation_prompt": True}
        ours = outcome(lambda messages=messages, values=values: template.render(messages=messages, **values, **SPECIAL))
        theirs = outcome(
            lambda messages=messages: render_jinja_template(
                conversations=[messages], chat_template=source, add_generation_prompt=True, **SPECIAL
            )[0][0]
        )
        assert ours == theirs
        texts.append(ours)
    assert len(set(texts)) >= 3
    assert "Hi" in texts[0].replace("HI", "Hi")


@pytest.mark.parametrize("name", ["_x", "__class__"])
def test_a_namespace_takes_no_underscored_names(name: str) -> None:
    environment = template_environment(datetime.now())
    for source in ("{% set n = namespace(**{'NAME': 1}) %}", "{% set n = namespace() %}{% set n.NAME = 1 %}"):
        with pytest.raises(SecurityError):
            environment.from_string(source.replace("NAME", name)).render()
