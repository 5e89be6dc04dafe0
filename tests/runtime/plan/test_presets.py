"""The figures of presets follow from what cards are made of, and a card that is described has those of its text."""

from itertools import product

import pytest

from moedge.offload.machine.profile import HEADS, TOGETHER, Machine
from moedge.runtime.plan.presets import PRESETS, find_preset, with_preset
from support.recorded_machine import RECORDED

# Bits of the memory bus and Gbit/s of a pin.
MEMORY = {
    "RTX 2060 6GB": (192, 14), "RTX 2060 12GB": (192, 14), "RTX 2060 Super 8GB": (256, 14), "RTX 2070 8GB": (256, 14),
    "RTX 2070 Super 8GB": (256, 14), "RTX 2080 8GB": (256, 14), "RTX 2080 Super 8GB": (256, 15.5),
    "RTX 2080 Ti 11GB": (352, 14), "TITAN RTX 24GB": (384, 14), "RTX 3050 6GB": (96, 14), "RTX 3050 8GB": (128, 14),
    "RTX 3060 8GB": (128, 15), "RTX 3060 12GB": (192, 15), "RTX 3060 Ti 8GB": (256, 14), "RTX 3070 8GB": (256, 14),
    "RTX 3070 Ti 8GB": (256, 19), "RTX 3080 10GB": (320, 19), "RTX 3080 12GB": (384, 19), "RTX 3080 Ti 12GB": (384, 19),
    "RTX 3090 24GB": (384, 19.5), "RTX 3090 Ti 24GB": (384, 21), "RTX 4060 8GB": (128, 17),
    "RTX 4060 Ti 8GB": (128, 18),
    "RTX 4060 Ti 16GB": (128, 18), "RTX 4070 12GB": (192, 21), "RTX 4070 Super 12GB": (192, 21),
    "RTX 4070 Ti 12GB": (192, 21), "RTX 4070 Ti Super 16GB": (256, 21), "RTX 4080 16GB": (256, 22.4),
    "RTX 4080 Super 16GB": (256, 23), "RTX 4090 24GB": (384, 21), "RTX 5050 8GB": (128, 20), "RTX 5060 8GB": (128, 28),
    "RTX 5060 Ti 8GB": (128, 28), "RTX 5060 Ti 16GB": (128, 28), "RTX 5070 12GB": (192, 28),
    "RTX 5070 Ti 16GB": (256, 28), "RTX 5080 16GB": (256, 30), "RTX 5090 32GB": (512, 28), "RTX A2000 12GB": (192, 12),
    "RTX A4000 16GB": (256, 14), "RTX A5000 24GB": (384, 16), "RTX A6000 48GB": (384, 16),
    "RTX 4000 Ada 20GB": (160, 18), "RTX 6000 Ada 48GB": (384, 20), "T4 16GB": (256, 10), "L4 24GB": (192, 12.5),
    "L40S 48GB": (384, 18), "A10 24GB": (384, 12.5), "A40 48GB": (384, 14.5), "A100 40GB": (5120, 2.43),
    "H100 80GB": (5120, 5.23),
    "GTX 1660 6GB": (192, 8), "GTX 1660 Super 6GB": (192, 14), "GTX 1660 Ti 6GB": (192, 12), "T1000 8GB": (128, 10),
    "Quadro RTX 4000 8GB": (256, 13), "Quadro RTX 5000 16GB": (256, 14), "Quadro RTX 6000 24GB": (384, 14),
    "Quadro RTX 8000 48GB": (384, 14), "RTX A2000 6GB": (192, 12), "RTX A4500 20GB": (320, 16),
    "RTX A5500 24GB": (384, 16), "RTX 2000 Ada 16GB": (128, 14), "RTX 4000 SFF Ada 20GB": (160, 14),
    "RTX 4500 Ada 24GB": (192, 18), "RTX 5000 Ada 32GB": (256, 18), "RTX 5880 Ada 48GB": (384, 20),
    "RTX PRO 2000 16GB": (128, 18), "RTX PRO 4000 SFF 24GB": (192, 18), "RTX PRO 4000 24GB": (192, 28),
    "RTX PRO 4500 32GB": (256, 28), "RTX PRO 5000 48GB": (384, 28), "RTX 4090 D 24GB": (384, 21),
    "A2 16GB": (128, 12.5), "A10G 24GB": (384, 12.5), "A30 24GB": (3072, 2.43), "L20 48GB": (384, 18),
}  # fmt: skip
# fp16 operations of a multiprocessor in a clock, with sums in fp32: those for desktops have half of the others' units.
FULL_RATE = ("TITAN", "Quadro", "RTX A", "RTX PRO", "T4", "L4", "A2 ", "A10 ", "A40")
WITHOUT_TENSOR_CORES = ("GTX", "T1000")
NARROW = ("RTX 3050", "RTX 4060", "RTX 5050", "RTX 5060", "RTX 2000 Ada", "RTX PRO 2000", "RTX PRO 4000 SFF", "A2 ")


def operations(name: str, capability: str) -> int:
    if name.startswith(WITHOUT_TENSOR_CORES):
        return 256
    if name.startswith(FULL_RATE) or " Ada " in name:
        return 1024
    return {"8.0": 2048, "9.0": 4096}.get(capability, 512)


def test_bandwidth_and_peak_are_those_of_the_bus_and_the_clock() -> None:
    assert MEMORY.keys() == PRESETS.keys()
    for name, (bits, pin_gbit) in MEMORY.items():
        preset = PRESETS[name]
        assert preset.bandwidth == pytest.approx(bits * pin_gbit / 8, rel=0.01), name
        assert preset.tflops == pytest.approx(
            preset.processors * preset.ghz * operations(name, preset.capability) / 1e3, rel=0.01
        ), name
        assert name.endswith(f" {preset.gib}GB")


def test_the_link_is_that_of_the_generation_and_narrow_where_cards_have_eight_lanes() -> None:
    generations = {"7.5": 3, "8.0": 4, "8.6": 4, "8.9": 4, "9.0": 5, "12.0": 5}
    for name, preset in PRESETS.items():
        assert preset.pcie == (generations[preset.capability], 8 if name.startswith(NARROW) else 16), name


def test_every_card_from_6_to_48_gb_has_rates_of_its_kernels() -> None:
    """Attention was priced as a product with one row, for want of a rate: thirty times its bytes."""
    for name, preset in PRESETS.items():
        rates = with_preset(name, preset, RECORDED.hardware, None).device_flop_s
        kinds = product(("bf16", "int8", "int4", "int8/int4"), (64, 128, 256))
        assert {HEADS.format(*each) for each in kinds} <= rates.keys()
        grouped = {TOGETHER.format(quant) for quant in ("none", "int8", "int4", "nf4", "mxfp4")}
        # Below 8.0 no kernel multiplies by tensor cores.
        assert bool(grouped & rates.keys()) == (preset.capability != "7.5")


@pytest.mark.parametrize("text", ["My card: 16GiB, 500GB/s, 60TFLOP/s, pcie4x8", "x:pcie4x8,60 TFLOPs,500 GB/s,16GB"])
def test_a_card_that_is_described_has_the_figures_of_its_text(text: str) -> None:
    name, preset = find_preset(text)
    assert name == text.partition(":")[0]
    assert (preset.gib, preset.bandwidth, preset.tflops, preset.pcie) == (16, 500, 60, (4, 8))
    machine = with_preset(name, preset, RECORDED.hardware, RECORDED)
    assert Machine.from_json(machine.to_json()) == machine
    assert machine.hardware.gpus[0].nbytes == 16 << 30
    assert machine.link is not None
    assert machine.link.pinned_bytes_s == pytest.approx(12.6e9, rel=0.01)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x: 16GiB, 500GB/s, pcie4x8", "lacks tflops"),
        ("x: 16GiB, 500GB/s, 60TFLOP/s, pcie4x9", "'pcie4x9'"),
        ("x: 16GiB, 24GiB, 500GB/s, 60TFLOP/s, pcie4x8", "'24gib'"),
        ("x: 0GiB, 500GB/s, 60TFLOP/s, pcie4x8", "figure of 0"),
        ("RTX 2060", "nearest: RTX 2060 6GB, RTX 2060 12GB"),
    ],
)
def test_a_description_that_says_too_little_or_what_nobody_knows_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        find_preset(text)
