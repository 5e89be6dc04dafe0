"""What importing `runtime/model` leaves out, and what a process takes of what plans count for it."""

import subprocess
import sys

import pytest

PROGRAM = """
from moedge.computing import settle
settle()
import importlib.util, sys
import moedge.batch
import moedge.runtime.loading.engine_loader
import moedge.runtime.weights.preparation
import transformers.models.qwen3_moe.modeling_qwen3_moe
from moedge.offload.machine.hardware import find_driver
from moedge.offload.memory import host_resident
from moedge.runtime.settings.settings import process_nbytes
print(host_resident() <= process_nbytes())
left_out = ["scipy"] if find_driver() else ["scipy", "triton"]
print([name for name in left_out if name in sys.modules])
for name in left_out:
    if importlib.util.find_spec(name):
        importlib.import_module(name)
print("imported")
"""


# Each looks for scipy or Triton in its own way, and remembers what it found.
FIRST = ("transformers", "scipy", "torch._dynamo")


@pytest.mark.parametrize("first", FIRST)
def test_whoever_imported_something_before_is_not_disturbed(first: str) -> None:
    code = f"import {first}\nimport moedge.runtime.loading.engine_loader"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models_are_defined_without_what_only_losses_and_compilers_need_and_a_process_takes_what_plans_count() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["True", "[]", "imported"]
