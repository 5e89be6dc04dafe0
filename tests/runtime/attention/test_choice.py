"""The table of attention backends: what auto takes, and what a backend that is asked for refuses."""

import pytest

from moedge.quant.kv_format import KV_FORMATS
from moedge.runtime.attention.choice import AttentionNeeds, choose_attention
from moedge.runtime.errors import SettingError


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_auto_takes_the_best_that_can(kv_format: str) -> None:
    small, large = frozenset({64, 128}), frozenset({64, 320})
    assert choose_attention("auto", AttentionNeeds(small, kv_format)) == "torch"
    assert choose_attention("auto", AttentionNeeds(small, kv_format, "cuda", (8, 6))) == "triton"
    assert choose_attention("auto", AttentionNeeds(small, kv_format, "cuda", (7, 0))) == "torch"
    assert choose_attention("auto", AttentionNeeds(large, kv_format, "cuda", (9, 0))) == "torch"


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (AttentionNeeds(frozenset({64}), "int8"), "runs on cuda, and this run computes on cpu"),
        (AttentionNeeds(frozenset({64}), "int8", "cuda", (6, 1)), "capability 7.5, this GPU has 6.1"),
        (AttentionNeeds(frozenset({320}), "int8", "cuda", (8, 0)), "at most 256 elements, this model's have 320"),
    ],
)
def test_a_backend_that_is_asked_for_says_what_it_cannot_do(needs: AttentionNeeds, reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        choose_attention("triton", needs)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(SettingError, match="use auto, triton, torch"):
        choose_attention("flash", AttentionNeeds(frozenset({64}), "int8"))
