"""Templates that loop, grow, reach for the interpreter or are none (`runtime/text/template.py`,
`runtime/text/template_worker.py`): refused in a sentence, or a text of no harm.
"""

import os
import resource
import time
from datetime import datetime

import pytest

from moedge.runtime.settings.errors import TemplateError
from moedge.runtime.text.template import RENDER_LIMIT_S, TemplateRenderer

BOMBS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" * 9,
    "{{ range(10**12) | list }}",
    "{{ range(10**9) | list | length }}",
    "{{ 'x' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ 9**9**9 }}",
    "{{ (10**999999) | string | length }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x\\ny' | indent(10**10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ '1'.zfill(10**10) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ lipsum(n=10**7) }}",
    "{{ messages | tojson(indent=10**10) }}",
    "{{ ('a ' * 10**6) | wordwrap(1, wrapstring='x' * 10**5) }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x | length }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ range(99999) | map('string') | sum(start='') }}",
    "{{ range(99999) | list | batch(1) | list | batch(1) | list | tojson }}{{ [[0] * 99999] * 99999 | tojson }}",
)
ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ '' | attr('__cla' ~ 'ss__') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | sort(attribute='__class__') }}",
    "{{ messages | groupby('__class__') }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ ('{0.__class__}' | string).format(1) }}",
    "{{ 'x'.format_map({'x': 1}.__class__) }}",
    "{{ cycler.__init__.__globals__.os.environ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ strftime_now.__self__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ range.__self__ }}",
    "{{ (messages | map('upper')).gi_frame.f_back.f_globals }}",
    "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% macro f() %}{{ caller.__globals__ }}{% endmacro %}{% call f() %}{% endcall %}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.environ }}",
    "{% from 'subprocess' import run %}{{ run('id') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].clear() }}",
    "{{ open('/etc/passwd').read() }}",
    "{{ __import__('os').environ }}",
    "{{ environ }}{{ config }}{{ request.application.__globals__ }}",
    "{% set __builtins__ = 1 %}{{ __builtins__.eval('1') }}",
)
MALFORMED = (
    "{{",
    "{% for %}",
    "{% if x %}",
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "{% if x %}" * 5_000 + "{% endif %}" * 5_000,
    "{{ 1" + " + 1" * 100_000 + " }}",
    "{{ x" + ".y" * 100_000 + " }}",
    "{% nothing_known %}",
    "\x00{{ messages }}\x00",
    "{{ messages | no_filter }}",
    "{{ messages is no_test }}",
    "{# " + "x" * 1_000_000,
)
EVERY = [*BOMBS, *ESCAPES, *MALFORMED]
SECRET = "a secret of the environment"
MOST_TEXT_NBYTES = 4 << 20


@pytest.mark.sample("3", "13", "28", "50", "62")
@pytest.mark.parametrize("source", EVERY, ids=map(str, range(len(EVERY))))
def test_a_hostile_template_is_refused_in_a_sentence_or_harmless(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEDGE_TEST_TOKEN", SECRET)
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with TemplateRenderer(source, {"eos_token": "</s>"}, datetime(2026, 1, 1)) as renderer:
        try:
            found, refused = renderer.render([{"role": "user", "content": "Hi"}]), False
        except TemplateError as error:
            found, refused = str(error), True
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    print(f"{'refused' if refused else 'rendered'} in {time.monotonic() - begun:.1f} s: {found[:80]!r}")
    # One second for the worker's own start and one for the process that ends it.
    assert spent < RENDER_LIMIT_S + 2
    assert len(found) < (2_000 if refused else MOST_TEXT_NBYTES)
    assert "\n" not in found or not refused
    for leaked in (SECRET, "root:", "<class", "<module", "<function", "uid=", os.getcwd(), "Traceback"):
        assert leaked not in found


def test_a_leak_would_be_noticed() -> None:
    with TemplateRenderer("{{ eos_token }}", {"eos_token": SECRET}, datetime(2026, 1, 1)) as renderer:
        assert SECRET in renderer.render([{"role": "user", "content": "Hi"}])
