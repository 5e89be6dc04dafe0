"""Do experts come out alike, however they are streamed and held? Every mode, policy, held share and mix of tiers.

    python bench/expert_modes.py [--families qwen3_moe mixtral ...]

Tiny random checkpoints of six families on a disk, in host memory, and on a fake device whose copies an adversarial
schedule orders: greedy tokens in fp32 must be those of a run that holds everything, and the counters must tell which
way was taken. Prints a line per family; exits 1 if anything differs.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "device"))

import expert_modes
import fake_device
import tiny_engine
import torch
from tiny_families import build_model, build_tokenizer

from moedge.runtime.loading.prepare import prepare
from moedge.runtime.settings.budgets import Budgets
from moedge.runtime.source.model_source import open_source


def check(family: str, folder: Path) -> int:
    """Prints what was run and what was not as it should be; returns how many ways were at fault."""
    model = build_model(family)
    model.save_pretrained(folder / "model")
    build_tokenizer(folder / "model", model.config.vocab_size)
    num_ways, num_faulty = 0, 0
    with open_source(str(folder / "model")) as source:
        prepare(source, folder / "store", "none", "fp32", Budgets())
        tiny = tiny_engine.Case(source, folder / "store", tiny_engine.exact("none"))
        wanted = tiny.run(tiny.plan(None)).tokens
        for way in expert_modes.ways():
            found = list(expert_modes.faults(way, way.run(tiny, fake_device), wanted))
            num_ways += 1
            num_faulty += bool(found)
            for fault in found:
                print(f"    {way}: {fault}")
    print(f"{family:12} {num_ways} ways, {num_faulty} at fault", flush=True)
    return num_faulty


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=expert_modes.FAMILIES)
    options = parser.parse_args()
    torch.set_num_threads(2)
    num_faulty = 0
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            num_faulty += check(family, Path(folder))
    sys.exit(num_faulty > 0)


if __name__ == "__main__":
    main()
