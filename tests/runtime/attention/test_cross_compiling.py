"""Kernels (`quant/kernels/`, `runtime/attention/kernels/`) compile for GPUs that are not there, by the rules: one or
two launches of each; `make kernels` takes all.
"""

import json
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRITON = version("triton")


def compile_quick(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With the Triton that is installed. In a process of its own: this one has the interpreter."""
    command = [sys.executable, "-m", "matrix.compiling.main", "--quick", "--json", "--triton", TRITON, *arguments]
    return subprocess.run(command, cwd=root / "tests", capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_each_kernel_compiles_and_keeps_the_rules() -> None:
    ran = compile_quick(ROOT, "--arch", "86", "90")
    assert ran.returncode == 0, ran.stderr
    reports = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    kernels = {"decode", "split decode", "extend", "merge", "store", "gate and up", "down"}
    assert {(one["kernel"], one["arch"]) for one in reports} == {(name, arch) for name in kernels for arch in (86, 90)}
    for one in reports:
        assert one["mma"] == one["dots"], one
        assert bool(one["codes"]) == (one["kernel"] not in {"merge", "store"}), one
    assert max(one["registers"] for one in reports) > 100, "a real kernel takes more registers than that"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "good", "bad", "words"),
    [
        (
            "quant/kernels/product.py",
            "others = tl.full((S.rows, S.outputs), 0.0, tl.float32)",
            "others = tl.zeros([S.rows, S.outputs], tl.float32)",
            "gate and up, bf16 nf4 1536x2048 silu 16 rows: does not compile",
        ),
        (
            "quant/kernels/tuning.py",
            "16: Tiles(16, 64, 128, 4, 3)",
            "16: Tiles(16, 256, 128, 4, 3)",
            "warps an SM, wanted 12 or more",
        ),
        (
            "quant/kernels/product.py",
            "tl.load(stack.shifts + matrix) * STEP",
            "tl.load(stack.shifts + matrix) * STEP + tl.program_id(0) // 65536",
            "codes are loaded",
        ),
    ],
    ids=["zeros", "tiles", "width"],
)
def test_what_was_mended_is_noticed_when_it_breaks(path: str, good: str, bad: str, words: str, tmp_path: Path) -> None:
    """Negative control, in a copy of the sources."""
    if words.endswith("compile") and not TRITON.startswith(("3.6", "3.7")):
        pytest.skip("Triton 3.8 and newer compile it")
    skipped = shutil.ignore_patterns("__pycache__", "checkpoints", "demo")
    for part in ("quant", "offload", "moe", "runtime", "cli", "tests/matrix", "tests/support"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    source = (tmp_path / path).read_text()
    assert source.count(good) == 1
    (tmp_path / path).write_text(source.replace(good, bad))
    ran = compile_quick(tmp_path, "--arch", "86")
    assert ran.returncode == 1, ran.stderr
    assert words in ran.stderr
