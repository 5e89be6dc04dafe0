"""The table of attention backends: what auto takes, and what a backend that is asked for refuses."""

import pytest

from moedge.quant.kernels.gpu import Gpu, Lacks
from moedge.runtime.attention.choice import AttentionNeeds, choose_attention
from moedge.runtime.settings.errors import SettingError

AMPERE, BROKEN = Gpu((8, 6), 28), Gpu((8, 6), 28, Lacks.everything("Triton is not installed"))
SMALL, LARGE = frozenset({64, 128}), frozenset({64, 320})


def test_auto_takes_the_best_that_can() -> None:
    assert choose_attention("auto", AttentionNeeds(SMALL)) == "torch"
    assert choose_attention("auto", AttentionNeeds(SMALL, AMPERE)) == "triton"
    assert choose_attention("auto", AttentionNeeds(SMALL, BROKEN)) == "torch"
    assert choose_attention("auto", AttentionNeeds(LARGE, AMPERE)) == "torch"
    assert choose_attention("auto", AttentionNeeds(SMALL, AMPERE, latent=True)) == "torch"


def test_the_interpreter_is_for_who_asks_for_it() -> None:
    needs = AttentionNeeds(SMALL, interpreted=True)
    assert choose_attention("auto", needs) == "torch"
    assert choose_attention("triton", needs) == "triton"


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (AttentionNeeds(SMALL), "runs on NVIDIA GPUs, and this run computes on the CPU"),
        (AttentionNeeds(SMALL, BROKEN), "Triton is not installed"),
        (AttentionNeeds(LARGE, AMPERE), "at most 256 elements, this model's have 320"),
        (AttentionNeeds(SMALL, AMPERE, latent=True), "Triton's kernels do not compute latent attention"),
    ],
)
def test_a_backend_that_is_asked_for_says_what_it_cannot_do(needs: AttentionNeeds, reason: str) -> None:
    with pytest.raises(SettingError, match=reason):
        choose_attention("triton", needs)


def test_cpu_kernels_are_chosen_where_the_library_is() -> None:
    assert choose_attention("auto", AttentionNeeds(SMALL, native_lack="")) == "native"
    assert choose_attention("auto", AttentionNeeds(LARGE, native_lack="", latent=True)) == "native"
    assert choose_attention("torch", AttentionNeeds(SMALL, native_lack="")) == "torch"
    assert choose_attention("auto", AttentionNeeds(SMALL, BROKEN, native_lack="")) == "torch"
    with pytest.raises(SettingError, match="native cannot compute this run: it was not built"):
        choose_attention("native", AttentionNeeds(SMALL, native_lack="it was not built"))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(SettingError, match="use auto, triton, native, torch"):
        choose_attention("flash", AttentionNeeds(SMALL))
