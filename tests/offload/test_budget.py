"""Sizes mean what people mean by them; a ledger never holds more than its budget and always says what it holds."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.offload.budget import BadSize, auto_device, auto_host, gib, nearest_form, parse_size

GIB = 1 << 30
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
UNITS |= {f"{letter}iB": size for letter, size in UNITS.items()} | {
    f"{x}B": 10 ** (3 * n) for n, x in enumerate("KMGT", 1)
}
TOTAL, AVAILABLE = 64 * GIB, 40 * GIB


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("7GiB", 7 * GIB), ("7G", 7 * GIB), ("7GB", 7 * 10**9), ("500MiB", 500 << 20), ("0.5 gib", GIB // 2),
        ("0", 0), ("0%", 0), ("80%", TOTAL * 4 // 5), ("12.5%", TOTAL // 8), ("auto", 36 * GIB),
        ("auto-1GiB", 35 * GIB), ("AUTO - 1G", 35 * GIB), (" 1536B ", 1536), ("1T", 1 << 40),
    ],
)  # fmt: skip
def test_each_form_means_its_bytes(text: str, nbytes: int) -> None:
    assert parse_size(text, TOTAL, AVAILABLE) == nbytes


@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(UNITS)), st.booleans())
def test_a_size_is_its_number_times_its_unit_rounded_down(whole: int, thousandths: int, unit: str, low: bool) -> None:
    text = f"{whole}.{thousandths:03}{unit}"
    exact = (whole + Fraction(thousandths, 1000)) * UNITS[unit]
    assert parse_size(text.lower() if low else text, TOTAL, AVAILABLE) == int(exact)


@given(st.integers(0, 100), st.integers(0, 1 << 45))
def test_a_percentage_is_of_the_total_whatever_is_free(percent: int, total: int) -> None:
    assert parse_size(f"{percent}%", total, 0) == total * percent // 100


@given(st.integers(0, 1 << 45))
def test_auto_leaves_two_gib_or_a_tenth(available: int) -> None:
    granted = auto_host(available)
    assert granted == parse_size("auto", available, available)
    assert granted == 0 or available - granted >= max(2 * GIB, available // 10)
    assert parse_size("auto", available, available, auto_device) == max(0, available - GIB // 2)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("7", "7GiB"), ("7 gigs", "7GiB"), ("-7GiB", "7GiB"), ("7,5GiB", "7.5GiB"), ("80 percent", "80%"),
        ("120m b", "120MiB"), ("auto+1GiB", "auto-1GiB"), ("auto1G", "auto-1GiB"), ("aut", "auto"), ("", "auto"),
        ("1e3GiB", "1GiB"), ("inf", "auto"), ("auto-5%", "auto-5GiB"), ("7GiBs", "7GiB"), ("7PiB", "7GiB"),
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_the_nearest_form(text: str, nearest: str) -> None:
    with pytest.raises(BadSize, match="wanted 7GiB, 7G, 7GB, 500MiB, 80%, auto, auto-1GiB or 0") as refusal:
        parse_size(text, TOTAL, AVAILABLE)
    assert str(refusal.value).endswith(f"nearest: {nearest}")


@given(st.text(max_size=30) | st.from_regex(r"(auto)?[-+ ]?[0-9.,]{1,20} ?[kKmMgGtTiIbB%]{0,4}", fullmatch=True))
@settings(max_examples=500)
def test_any_text_is_a_size_or_a_refusal_and_the_nearest_form_is_a_size(text: str) -> None:
    def refusal(tried: str) -> str:
        try:
            return "" if parse_size(tried, TOTAL, AVAILABLE) >= 0 else "negative"
        except BadSize as refused:
            return str(refused)

    assert len(refusal(text)) < 300
    assert refusal(nearest_form(text)) == "" or "leaves nothing" in refusal(nearest_form(text))


@pytest.mark.parametrize(("text", "says"), [("101%", "more than all"), ("auto-37GiB", "auto is 36.00 GiB")])
def test_a_size_that_leaves_nothing_or_more_than_all_is_refused(text: str, says: str) -> None:
    with pytest.raises(BadSize, match=says):
        parse_size(text, TOTAL, AVAILABLE)


def test_small_sizes_have_no_tenths_that_say_nothing() -> None:
    kib = 1024
    shown = {0: "0 MiB", 1: "0 KiB", kib: "1 KiB", 1536: "1.5 KiB", 100 * kib: "100 KiB", 440 * kib + 90: "440 KiB"}
    shown |= {kib * kib - 1: "1 MiB", kib * kib: "1 MiB", 5 << 20: "5 MiB"}
    assert {nbytes: gib(nbytes) for nbytes in shown} == shown
