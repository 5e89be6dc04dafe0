import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from moedge.runtime.settings.errors import TemplateError
from moedge.runtime.text import template as template_module
from moedge.runtime.text.template import Child, TemplateRenderer

NOW = datetime(2026, 1, 2, 3, 4)
GOOD = [{"role": "user", "content": "good"}]
EVIL = [{"role": "user", "content": "evil"}]

ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attr filter": "{{ (messages|attr('__class__')).mro() }}",
    "globals of a list": "{{ messages.__init__.__globals__['os'].system('id') }}",
    "globals of raise_exception": "{{ raise_exception.__globals__['json'] }}",
    "globals of strftime_now": "{{ strftime_now.__closure__[0].cell_contents }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "globals of lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "globals of namespace": "{{ namespace.__init__.__globals__['json'] }}",
    "format string": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "format map": "{{ '{m.__class__.__mro__}'.format_map({'m': messages}) }}",
    "underscored namespace": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "underscored namespace argument": "{% set n = namespace(**{'_x': 1}) %}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update(role='system') }}",
    "import": "{% import 'os' as os %}{{ os.system('id') }}",
    "include": "{% include '/etc/passwd' %}",
    "surrogate": "{{ '\\ud800' }}",
    "exception": "{{ raise_exception('no') }}",
    "division": "{{ 1 / (messages|length - 1) }}",
    "undefined": "{{ nothing.at.all }}",
}
BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "doubling macro": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(messages|length + 80) }}"
    ),
    "power": "{{ (messages|length + 8) ** (10 ** 9) }}",
    "recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "giant range": "{% for i in range(10 ** 9 * messages|length) %}{% endfor %}",
    "giant string": "{{ 'a' * (messages|length * 10 ** 10) }}",
    "giant format": "{{ '%4000000000d' % messages|length }}",
    "giant padding": "{{ messages[0].content.ljust(10 ** 10) }}",
    "giant indent": "{{ messages|tojson(indent=10 ** 10) }}",
    "doubling string": (
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s|length }}"
    ),
    "endless output": "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
}
BROKEN = {
    "folded power": "{{ 9 ** (9 ** 9) }}",
    "folded string": "{{ 'a' * 10 ** 10 }}",
    "unknown tag": "{% while true %}{% endwhile %}",
    "unclosed": "{% for m in messages %}",
    "deep parentheses": "{{ " + "(" * 100_000 + " }}",
    "deep blocks": "{% if messages %}" * 3_000 + "{% endif %}" * 3_000,
    "deep lists": "{{ " + "[" * 50_000 + "]" * 50_000 + " }}",
}


def renderer(source: str, limit_s: float = 2.0) -> TemplateRenderer:
    return TemplateRenderer(source, {"bos_token": "<s>"}, NOW, limit_s)


@pytest.fixture
def chatml() -> Iterator[TemplateRenderer]:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}!{% endif %}"
    )
    with renderer(source) as made:
        yield made


def test_an_escape_is_one_rows_error_and_the_next_row_renders() -> None:
    """By one process, which outlives each."""
    evil = "".join("{% if messages[0].content == '" + name + "' %}" + ESCAPES[name] + "{% endif %}" for name in ESCAPES)
    with renderer(evil + "fine {{ messages[0].content }}") as made:
        for name in ESCAPES:
            with pytest.raises(TemplateError):
                pytest.fail(f"{name} gave {made.render([{'role': 'user', 'content': name}])}")
            assert made.render(GOOD) == "fine good"


# Time, memory, depth and output.
@pytest.mark.sample("nested loops", "giant string", "recursive macro", "endless output")
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_one_rows_error_and_the_next_row_renders(name: str) -> None:
    source = "{% if messages[0].content == 'evil' %}" + BOMBS[name] + "{% endif %}fine {{ messages[0].content }}"
    with renderer(source, limit_s=0.8) as made:
        with pytest.raises(TemplateError):
            made.render(EVIL)
        assert made.render(GOOD) == "fine good"


@pytest.mark.parametrize("name", BROKEN)
def test_a_template_that_cannot_even_be_compiled_is_a_template_error(name: str) -> None:
    with renderer(BROKEN[name], limit_s=0.5) as made:
        for _ in range(2):
            with pytest.raises(TemplateError):
                made.render(GOOD)


def test_the_message_of_a_template_is_shown_without_its_controls() -> None:
    with renderer("{{ raise_exception('roles must \x1b[31m alternate' ~ '!' * 9999) }}") as made:
        with pytest.raises(TemplateError, match=r"roles must \\x1b\[31m alternate") as caught:
            made.render(GOOD)
        assert len(str(caught.value)) < 800


def test_output_up_to_eight_times_its_input_is_accepted() -> None:
    with renderer("{% for i in range(8) %}{{ messages[0].content }}{% endfor %}") as made:
        text = "é" * 1_000_000
        assert made.render([{"role": "user", "content": text}]) == text * 8
    nine_times = "{% for i in range(9) %}{{ messages[0].content }}{% endfor %}"
    with renderer(nine_times) as made, pytest.raises(TemplateError, match="larger"):
        made.render([{"role": "user", "content": text}])


def test_text_travels_unchanged(chatml: TemplateRenderer) -> None:
    text = "".join(map(chr, range(0x800))) + "\u2028\ufeff\uffff🙂\U0010ffff {{ 7 * 7 }} {% raw %} </script> \r\n"
    assert chatml.render([{"role": "user", "content": text}]) == f"<user>{text}!"


def test_messages_without_a_text_form_are_refused_before_they_are_sent(chatml: TemplateRenderer) -> None:
    with pytest.raises(UnicodeEncodeError):
        chatml.render([{"role": "user", "content": "\ud800"}])
    assert chatml.render(GOOD) == "<user>good!"


def test_the_date_is_the_same_in_every_render() -> None:
    with renderer("{{ strftime_now('%d %b %Y %H:%M') }} {{ bos_token }} {{ tools }}") as made:
        assert made.render(GOOD) == made.render(GOOD) == "02 Jan 2026 03:04 <s> None"


def test_a_closed_renderer_leaves_no_process_and_starts_again(chatml: TemplateRenderer) -> None:
    others = children(os.getpid())
    assert chatml.render(GOOD) == "<user>good!"
    assert len(children(os.getpid())) == len(others) + 1
    chatml.close()
    chatml.close()
    assert children(os.getpid()) == others
    assert chatml.render(GOOD) == "<user>good!"


def test_a_worker_that_was_killed_is_replaced(chatml: TemplateRenderer) -> None:
    others = children(os.getpid())
    chatml.render(GOOD)
    (worker,) = set(children(os.getpid())) - set(others)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(TemplateError, match="crashed its process"):
        chatml.render(GOOD)
    assert chatml.render(GOOD) == "<user>good!"


def test_the_reply_to_an_interrupted_render_reaches_no_other_row(
    chatml: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    chatml.render(GOOD)
    with monkeypatch.context() as patch:
        patch.setattr(Child, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chatml.render(EVIL)
    assert chatml.render(GOOD) == "<user>good!"


@pytest.mark.parametrize("reply", ["[1]", "{}", '{"text": 3}', '"text"', "}", "\\xff", '{"error": null}'])
def test_a_worker_that_talks_nonsense_is_a_template_error(monkeypatch: pytest.MonkeyPatch, reply: str) -> None:
    code = f"""
import sys, time
def send(body): sys.stdout.buffer.write(len(body).to_bytes(4, "big") + body); sys.stdout.buffer.flush()
send(b"true"); send(b'{reply}'); time.sleep(60)
"""
    monkeypatch.setattr(template_module, "_COMMAND", (sys.executable, "-c", code))
    with renderer("x") as made, pytest.raises(TemplateError, match="crashed its process"):
        made.render(GOOD)


def test_a_worker_that_cannot_start_is_no_fault_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "_COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    with renderer("x") as made, pytest.raises(RuntimeError, match="did not start"):
        made.render(GOOD)


def test_starting_does_not_count_against_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time; time.sleep(1.2); from moedge.runtime.text.template_worker import main; main()"
    monkeypatch.setattr(template_module, "_COMMAND", (sys.executable, "-c", code))
    with renderer("fine", limit_s=1.0) as made:
        assert made.render(GOOD) == "fine"


def test_an_endless_render_does_not_outlive_a_killed_parent() -> None:
    code = f"""
import time
from datetime import datetime
from moedge.runtime.text.template import pack
from moedge.runtime.text.template import TemplateRenderer
worker = TemplateRenderer({BOMBS["nested loops"]!r}, {{}}, datetime.now(), limit_s=0.5)._start()
worker.send(pack([]), time.monotonic() + 60)
print(flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (worker,) = children(parent.pid)
        parent.kill()
    try:
        wait_for(lambda: not alive(worker))
    finally:
        if alive(worker):
            os.kill(worker, signal.SIGKILL)


def wait_for(condition: Callable[[], object]) -> None:
    for _ in range(3_000):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen in time")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, moedge.runtime.text.tokenizer; "
        "raise SystemExit(', '.join({'torch', 'transformers', 'jinja2', 'numpy'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
