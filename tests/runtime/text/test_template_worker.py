import subprocess
import sys
from datetime import datetime

import pytest

from moedge.runtime.settings.errors import TemplateError
from moedge.runtime.text.template import TemplateRenderer
from moedge.runtime.text.template_worker import bounded_text, template_environment

CONFINED = """
import os, socket, sys
from moedge.runtime.text.template_worker import confine
confine()
def refused(attempt):
    try: attempt()
    except (OSError, MemoryError): return True
    return False
attempts = [
    lambda: open("/etc/hostname"), lambda: open("/tmp/written", "w"), lambda: os.listdir("/"), os.pipe,
    lambda: socket.socket(), lambda: bytearray((1 << 30) + (1 << 26)), lambda: os.dup(1),
]
granted = [i for i, attempt in enumerate(attempts) if not refused(attempt)]
bytearray(1 << 28)
print(granted, {"torch", "transformers", "numpy"} & set(sys.modules))
"""


def test_a_confined_process_gets_no_file_no_socket_and_no_gibibyte() -> None:
    done = subprocess.run([sys.executable, "-c", CONFINED], capture_output=True, text=True, check=True)
    assert done.stdout == "[] set()\n"


def outcome(renderer: TemplateRenderer, role: str) -> str:
    try:
        return renderer.render([{"role": role, "content": "a"}])
    except TemplateError as error:
        return str(error)


def test_every_filter_works_in_the_confined_process() -> None:
    # What a filter imports late can no longer be opened there; it has to be loaded before.
    filters = sorted(template_environment(datetime.now()).filters)
    calls = "".join(f"{{% elif messages[0].role == '{name}' %}}{{{{ messages|{name} }}}}" for name in filters)
    with TemplateRenderer("{% if false %}" + calls + "{% endif %}done", {}, datetime.now()) as renderer:
        outcomes = [outcome(renderer, name) for name in filters]
    assert sum(text.endswith("done") for text in outcomes) > 30
    assert not [text for text in outcomes if "OSError" in text or "Import" in text or ".py" in text]


def test_output_is_counted_in_bytes_as_it_comes() -> None:
    assert bounded_text(["é", "é"], 4) == "éé"

    def endless() -> object:
        while True:
            yield "a"

    for chunks in (["é", "é", "a"], endless()):
        with pytest.raises(OverflowError):
            bounded_text(chunks, 4)
