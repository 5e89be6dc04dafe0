"""The figures of presets follow from what cards are made of: memory bus, multiprocessors and clocks."""

import pytest

from moedge.offload.machine.presets import PRESETS

# Bits of the memory bus, Gbit/s of a pin, boost clock in GHz, fp16 operations a clock and SM, with fp32 sums.
MADE_OF = {
    "RTX 2060 6GB": (192, 14, 1.68, 512),
    "RTX 3060 12GB": (192, 15, 1.777, 512),
    "RTX 3060 Ti 8GB": (256, 14, 1.665, 512),
    "RTX 3070 8GB": (256, 14, 1.725, 512),
    "RTX 3080 10GB": (320, 19, 1.71, 512),
    "RTX 3090 24GB": (384, 19.5, 1.695, 512),
    "RTX 4060 8GB": (128, 17, 2.46, 512),
    "RTX 4060 Ti 16GB": (128, 18, 2.535, 512),
    "RTX 4070 12GB": (192, 21, 2.475, 512),
    "RTX 4080 16GB": (256, 22.4, 2.505, 512),
    "RTX 4090 24GB": (384, 21, 2.52, 512),
    "RTX 5090 32GB": (512, 28, 2.407, 512),
    "T4 16GB": (256, 10, 1.59, 1024),
    "L4 24GB": (192, 12.5, 2.04, 1024),
    "A10 24GB": (384, 12.5, 1.695, 1024),
    "A100 40GB": (5120, 2.43, 1.41, 2048),
    "H100 80GB": (5120, 5.23, 1.83, 4096),
}


def test_bandwidth_and_peak_are_those_of_the_bus_and_the_clock() -> None:
    assert MADE_OF.keys() == PRESETS.keys()
    for name, (bits, pin_gbit, boost_ghz, per_clock) in MADE_OF.items():
        preset = PRESETS[name]
        assert preset.bandwidth == pytest.approx(bits * pin_gbit / 8, rel=0.01), name
        assert preset.tflops == pytest.approx(preset.processors * boost_ghz * per_clock / 1e3, rel=0.01), name
        assert name.endswith(f" {preset.gib}GB")


def test_the_link_is_that_of_the_generation_and_narrow_where_cards_have_eight_lanes() -> None:
    generations = {"7.5": 3, "8.0": 4, "8.6": 4, "8.9": 4, "9.0": 5, "12.0": 5}
    for name, preset in PRESETS.items():
        assert preset.pcie == (generations[preset.capability], 8 if "4060" in name else 16), name
