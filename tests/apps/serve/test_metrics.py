"""`/metrics` (`apps/serve/metrics.py`, `apps/serve/counts.py`): the page by the rules of Prometheus' text format,
and what it counts.
"""

import re
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai import OpenAI

from moedge.apps.serve.batches import _BatchRun
from moedge.apps.serve.counts import BUCKETS, Histogram, ServerCounts
from moedge.face import Counts

from .test_api import COMPLETION, begin, completions, line, plain, polled

CHAT = "/v1/chat/completions"
SAMPLE = re.compile(r'([a-z_]+)(?:\{([a-z_]+="[^"\\\n]*"(?:,[a-z_]+="[^"\\\n]*")*)\})? ([0-9.e+-]+)')
Page = dict[str, dict[str, float]]


def parsed(text: str) -> tuple[Page, dict[str, str]]:
    """Samples by name and labels, and the kinds of metrics; what breaks the format's rules is an error."""
    assert text.endswith("\n")
    samples: Page = {}
    kinds: dict[str, str] = {}
    about = ""
    for each in text.splitlines():
        if each.startswith("# HELP "):
            about = each.split()[2]
            assert about not in kinds
        elif each.startswith("# TYPE "):
            _, _, name, kind = each.split()
            assert name == about
            kinds[name] = kind
        else:
            found = SAMPLE.fullmatch(each)
            assert found, each
            name, labels, value = found.groups()
            ends = ("_bucket", "_sum", "_count") if kinds[about] == "histogram" else ("",)
            assert name in [about + end for end in ends], "samples follow their own TYPE"
            assert (labels or "") not in samples.setdefault(name, {})
            samples[name][labels or ""] = float(value)
    return samples, kinds


def page(client: OpenAI) -> Page:
    return parsed(plain(client, "/metrics"))[0]


def grown(after: Page, before: Page, name: str, labels: str) -> float:
    return after[name][labels] - before.get(name, {}).get(labels, 0)


def test_metrics_are_named_as_prometheus_asks(client: OpenAI) -> None:
    """https://prometheus.io/docs/practices/naming: a prefix, base units in the plural, `_total` for counters only."""
    client.completions.create(model="any", prompt="In", max_tokens=3)
    samples, kinds = parsed(plain(client, "/metrics"))
    for name, kind in kinds.items():
        assert name.startswith("moedge_")
        assert (kind == "counter") == name.endswith("_total")
        assert (kind == "histogram") == name.endswith("_seconds")
        assert kind in ("counter", "histogram", "gauge")
        assert not re.search(r"(kib|mib|gib|kb|mb|gb|ms|millis|nbytes)(_|$)", name)
        assert ("memory" in name) == name.endswith("_bytes")
        assert all(value >= 0 for value in samples.get(name, {}).values())
    # A counter and a gauge of one name would be one family to a reader that drops `_total`.
    assert len({name.removesuffix("_total") for name in kinds}) == len(kinds)


def test_buckets_add_up_to_the_count_and_end_in_infinity(client: OpenAI) -> None:
    client.completions.create(model="any", prompt="In", max_tokens=3)
    samples, kinds = parsed(plain(client, "/metrics"))
    for name in (name for name, kind in kinds.items() if kind == "histogram"):
        for labels, count in samples[f"{name}_count"].items():
            series = {
                own.removeprefix(f"{labels},"): value
                for own, value in samples[f"{name}_bucket"].items()
                if own.startswith(labels)
            }
            ends = [float(each.removeprefix('le="').rstrip('"')) for each in series]
            assert ends == sorted(ends) == [*BUCKETS, float("inf")]
            assert list(series.values()) == sorted(series.values())
            assert series['le="+Inf"'] == count > 0


def test_a_bucket_has_what_is_at_most_its_end() -> None:
    histogram = Histogram()
    for seconds in (BUCKETS[0], BUCKETS[0] * 1.01, BUCKETS[-1] + 1):
        histogram.observe(seconds)
    counts = dict(histogram.cumulative())
    assert (counts[f"{BUCKETS[0]:g}"], counts[f"{BUCKETS[1]:g}"], counts[f"{BUCKETS[-1]:g}"]) == (1, 2, 2)
    assert counts["+Inf"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_timed_from_their_request_on(client: OpenAI, stream: bool) -> None:
    before, began = page(client), time.monotonic()
    asked: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}
    answer = client.chat.completions.create(**asked, stream=stream, extra_body={"ignore_eos": True})
    assert not stream or list(answer)
    seconds, after, labels = time.monotonic() - began, page(client), f'endpoint="{CHAT}"'
    # The thread of passes counts an answer once it has handed it out.
    while grown(after, before, "moedge_request_duration_seconds_count", labels) < 1:
        after = page(client)
    sums = {}
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert grown(after, before, f"moedge_{name}_seconds_count", labels) == 1, name
        sums[name] = grown(after, before, f"moedge_{name}_seconds_sum", labels)
    whole, first, token = sums.values()
    assert 0 < first < whole <= seconds
    assert first + 5 * token == pytest.approx(whole, abs=1e-6)


def test_rows_are_counted_and_their_errors_by_code(client: OpenAI) -> None:
    before = page(client)
    rows = completions(3, 2) + line("long", COMPLETION, prompt="x", max_tokens=10_000)
    assert polled(client, begin(client, rows)).request_counts.failed == 1
    after = page(client)
    assert grown(after, before, "moedge_rows_total", 'outcome="answered"') == 3
    assert grown(after, before, "moedge_rows_total", 'outcome="failed"') == 1
    code = 'code="context_length_exceeded"'
    assert grown(after, before, "moedge_row_errors_total", code) == 1


def test_rows_that_an_earlier_server_answered_are_not_counted_again() -> None:
    engine = SimpleNamespace(counts=ServerCounts())
    run = _BatchRun(SimpleNamespace(engine=engine), None, None)  # type: ignore[arg-type]
    counts = Counts(ok=7, failed=2, codes=Counter(invalid_value=2))
    running: Any = SimpleNamespace(
        session=SimpleNamespace(journal=SimpleNamespace(state=SimpleNamespace(counts=counts)))
    )
    run._count_rows(running)
    counts.ok, counts.failed, counts.codes = 9, 3, Counter(invalid_value=2, worker_crashed=1)
    run._count_rows(running)
    assert engine.counts.rows == {"answered": 2, "failed": 1}
    assert engine.counts.row_errors == {"worker_crashed": 1}


def test_errors_of_requests_are_counted_by_code_wherever_they_are_refused(client: OpenAI) -> None:
    """By a route, by what stands before the routes, and where there is no route."""
    before = page(client)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="any", prompt="In", temperature=-1)
    with pytest.raises(openai.APIStatusError):
        client.completions.create(model="any", prompt="x" * 20_001)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="any", input="x")
    after = page(client)
    for code in ("invalid_value", "request_too_large", "unknown_url"):
        assert grown(after, before, "moedge_request_errors_total", f'code="{code}"') == 1, code
