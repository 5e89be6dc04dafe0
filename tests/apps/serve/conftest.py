"""A server in this process on a free port, and clients of it."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from moedge.apps.serve.limits import ServerLimits, ServerSettings
from moedge.apps.serve.server import RunningServer, open_server

ENGINE = {
    "ram": "3GiB", "gpu_mem": 0, "dtype": "fp32", "quant": "none", "kv": "fp32", "deterministic": True,
    "rows": 20, "prompt_tokens": 40, "output_tokens": 20, "max_model_len": 400, "max_sequences": 8,
    "tokens_per_pass": 64,
}  # fmt: skip
LIMITS = ServerLimits(upload_nbytes=200_000, body_nbytes=20_000, files=40, queued=10)


@contextmanager
def running(model: Path, folder: Path) -> Iterator[RunningServer]:
    with open_server(ServerSettings(str(model), port=0, folder=folder, options=ENGINE, limits=LIMITS)) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join()


@pytest.fixture(scope="session")
def served(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The address of a server, for all tests of this folder."""
    folder = tmp_path_factory.mktemp("served")
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    try:
        with running(checkpoint("qwen3_moe"), folder / "server") as server:
            yield server
    finally:
        os.environ.pop("XDG_STATE_HOME")
        if before is not None:
            os.environ["XDG_STATE_HOME"] = before


@pytest.fixture
def client(served: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.url, api_key="not-asked-for", max_retries=0, timeout=300) as opened:
        yield opened
