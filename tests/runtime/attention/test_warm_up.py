"""Before a job begins every kernel that it can ask for (`runtime/attention/triton_backend.py`) is launched once, and
nothing is computed by that.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from moedge.quant.kernels.gpu import Gpu
from support.kernels.attention_setup import AMPERE, TURING, TritonSetup

TESTS = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "0", reason="these caches are in host memory")


@pytest.mark.slow
def test_a_job_of_growing_sequences_asks_for_no_kernel_that_was_not_warmed_up() -> None:
    """In a process of its own: this one has Triton's interpreter in place of its compiler."""
    ran = subprocess.run(
        [sys.executable, "-m", "support.kernels.job_keys"], capture_output=True, text=True, check=False, cwd=TESTS
    )
    assert ran.returncode == 0, ran.stderr
    jobs = json.loads(ran.stdout.splitlines()[-1])
    assert len(jobs) == 6
    for name, job in jobs.items():
        assert job["beyond"] == [], name
        assert job["used"] > 1, name
        # Store, decode, split decode, merge and extend: whatever the number of splits.
        assert job["warmed"] <= 5, name


@pytest.mark.parametrize(
    ("gpu", "tiled", "wanted"),
    [
        (AMPERE, False, {"store_tokens": 1, "attend_pages": 3, "merge_splits": 1}),
        (AMPERE, True, {"store_tokens": 1, "attend_pages": 1}),
        (TURING, False, {"store_tokens": 1, "attend_pages": 2, "merge_splits": 1}),
    ],
    ids=["sm86", "sm86 tiled", "sm75"],
)
def test_warming_up_neither_stores_nor_reads_a_token(gpu: Gpu, tiled: bool, wanted: dict[str, int]) -> None:
    setup = TritonSetup((4, 2, 64), "int8/int4", tiled=tiled, features="all", gpu=gpu, lengths=(5,))
    assert setup.attention.warm_up_launches() == []
    setup.run(5)
    stored = setup.pool.memory.bytes.clone()
    launches = setup.attention.warm_up_launches()
    assert Counter(launch.kernel.fn.__name__ for launch in launches) == wanted
    for launch in launches:
        launch.run()
    assert torch.equal(setup.pool.memory.bytes, stored)
