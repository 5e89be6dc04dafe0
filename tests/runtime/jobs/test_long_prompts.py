"""A prompt of megabytes costs neither its bytes in memory nor the job: it is one error row (`runtime/jobs/encode.py`),
and one refused request.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moedge.runtime.jobs.encode import RowEncoder
from moedge.runtime.rows.row import Defaults, Endpoint, ErrorCode, RowFailure
from moedge.runtime.rows.row_formats import RowBuilder, RowPosition
from moedge.runtime.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model"
LONG = "the quick (brown) fox_jumps\n" * 280_000
# Of a text of 7.5 MiB; encoding it takes 1.4 GiB.
MOST_NBYTES = 150 << 20


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    with Tokenizer.load(MODEL) as loaded:
        yield loaded


def peak_nbytes(call: Callable[[], Any]) -> tuple[Any, int]:
    """What `call` returns, and the most memory that this process had meanwhile beyond what it had before."""

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    result = call()
    return result, status("VmHWM") - before


@pytest.mark.parametrize("prompt", [
    {"prompt": LONG}, {"messages": [{"role": "user", "content": LONG}]},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": LONG},
                  {"role": "user", "content": "hi"}]},
], ids=["prompt", "chat", "chat of turns"])  # fmt: skip
def test_i10_a_prompt_of_megabytes_is_refused_in_little_memory(prompt: dict[str, Any], tokenizer: Tokenizer) -> None:
    encoder = RowEncoder(tokenizer, 4000, 4096)
    endpoint = Endpoint.COMPLETION if "prompt" in prompt else Endpoint.CHAT
    row = RowBuilder(Defaults()).build({**prompt, "max_tokens": 2}, endpoint, RowPosition(0, 1, "a"))
    failure, nbytes = peak_nbytes(lambda: encoder.encode(row))
    assert isinstance(failure, RowFailure)
    assert failure.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "at least" in failure.message
    assert nbytes < MOST_NBYTES


@pytest.mark.parametrize("text", ["word " * 2000, "日本語の文" * 500, "a" * 9000, " " * 20_000, "\U0001f600" * 900, ""])
def test_no_prompt_that_fits_is_refused_for_its_length(text: str, tokenizer: Tokenizer) -> None:
    """Pieces are never counted as more tokens than the whole has, wherever they cut."""
    whole = len(tokenizer.encode_verbatim(text))
    for most in (1, 7, 100, max(1, whole - 1), whole):
        assert tokenizer.at_least([text], most) <= whole
