"""Tiny random checkpoints, made once a session, and the stock models that judge ours."""

import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

# As the command line does, before torch is loaded: spinning threads make tests on a busy machine ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Triton kernels run in its interpreter, decided before they are imported; 0 asks for a GPU.
if os.environ.setdefault("TRITON_INTERPRET", "1") != "0":
    # Tests of the CPU, and of what people meet without a GPU, pass on a machine that has one, too.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

from support.row_files import read_rows, write_rows
from support.tiny_families import save_tiny

# Until all tests are collected, which makes a million objects that stay: `pytest_collection_finish`.
gc.disable()

REAL = Path(__file__).parent / "real"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests of real weights need a download: only `-m real` runs them (make real)."""
    return True if collection_path == REAL and "real" not in config.option.markexpr else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what `sample` leaves out: cases beyond its count, or cases that it does not name."""
    seen: dict[str, int] = {}
    for item in items:
        if (mark := item.get_closest_marker("sample")) is None:
            continue
        test, _, case = item.nodeid.partition("[")
        seen[test] = seen.get(test, 0) + 1
        chosen = case.rstrip("]") in mark.args if isinstance(mark.args[0], str) else seen[test] <= mark.args[0]
        if not chosen:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Libraries and thousands of tests are there to the end: each job that closes would have the collector walk through
    them."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoint(family)` is the folder of a tiny random checkpoint, made once a session; sizes may be others."""

    @functools.cache
    def make(family: str, **sizes: int) -> Path:
        folder = tmp_path_factory.mktemp(family)
        save_tiny(family, folder, **sizes)
        return folder

    return make


@pytest.fixture(scope="session")
def stock() -> Callable[[Path], Any]:
    """`stock(folder)` is transformers' own model of a checkpoint, in fp32."""

    @functools.cache
    def load(folder: Path) -> Any:
        from transformers import AutoConfig

        from moedge.runtime.model.text_class import text_class

        stock = text_class(type(AutoConfig.from_pretrained(folder)))
        return stock.from_pretrained(folder, dtype=torch.float32).eval()

    return load


@pytest.fixture
def engine(checkpoint: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """`engine("qwen3_moe", Workload(4, 40), quant="int8")` is loaded by a plan of its own, and closed with the test.

    The model is a family's tiny checkpoint, a folder or an open source; in place of a workload a plan may be given.
    `ram` bytes are the budget; other words are settings, whose defaults here are fp32 and no quantization.
    """
    from moedge.runtime.loading.engine_loader import load_engine
    from moedge.runtime.plan.placement import Workload
    from moedge.runtime.plan.planner import make_plan
    from moedge.runtime.settings.settings import MemoryBudget, Settings
    from moedge.runtime.source.model_source import ModelSource, open_source

    with ExitStack() as opened:

        def load(model: Any, job: Any, store: Path | None = None, ram: int = 1 << 36, **settings: Any) -> Any:
            folder = checkpoint(model) if isinstance(model, str) else model
            source = folder if isinstance(folder, ModelSource) else opened.enter_context(open_source(str(folder)))
            if isinstance(job, Workload):
                chosen = Settings(**{"dtype": "fp32", "quant": "none", "kv": "fp32", **settings})
                job = make_plan(source.shape, chosen, MemoryBudget(ram), job)
            return opened.enter_context(closing(load_engine(source, job, store)))

        yield load


@pytest.fixture(autouse=True, scope="session")
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Jobs are listed in the user's state folder, settings stand in the user's and in `MOEDGE_...`; the tests' are not
    the user's. Processes started here inherit that."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))
    for name in [name for name in os.environ if name.startswith("MOEDGE_") and name != "MOEDGE_ISA"]:
        del os.environ[name]


@pytest.fixture(autouse=True, scope="session")
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> None:
    """A shell's background jobs ignore SIGINT, and so would the processes that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`cli("batch", ...)` is the exit code; "MOEDGE_NAME=value" sets a variable for this call, as in a shell."""
    from moedge.cli.main import main

    def call(*arguments: object) -> int:
        texts = [str(each) for each in arguments]
        variables = [each for each in texts if each.startswith("MOEDGE_")]
        with monkeypatch.context() as patch:
            for name, _, value in (each.partition("=") for each in variables):
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["moedge", *(each for each in texts if each not in variables)])
            with pytest.raises(SystemExit) as ended:
                main()
        return int(ended.value.code or 0)

    return call


@pytest.fixture
def rows_file() -> Callable[[Path, list[dict[str, Any]]], Path]:
    return write_rows


@pytest.fixture
def rows_of() -> Callable[[Path], list[dict[str, Any]]]:
    return read_rows
