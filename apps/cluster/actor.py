"""What Ray starts for a worker, and asks after the death of one. Variables of torch are set before it is imported."""

from __future__ import annotations

import copyreg
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ... import MoedgeError
from ...face import JobFolder, memory_kills, settle

if TYPE_CHECKING:
    from .worker import Worker, WorkerInfo


def _read_only(values: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(values)


# Plans hold read-only dictionaries, which pickle does not know.
copyreg.pickle(MappingProxyType, lambda proxy: (_read_only, (dict(proxy),)))


@dataclass(frozen=True, slots=True)
class Refused:
    """A worker cannot do what was asked of it, and why."""

    message: str


class WorkerActor:
    """A process of a cluster with a worker in it."""

    def __init__(self, model: str) -> None:
        settle()
        self._model = model
        self._worker: Worker | None = None

    def hello(self, facts: Mapping[str, object]) -> tuple[WorkerInfo, str] | Refused:
        """Where and what it is, with Ray's name of the node."""
        import ray

        found = self.call("hello", facts)
        return found if isinstance(found, Refused) else (found, ray.get_runtime_context().get_node_id())

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the worker returns, or Refused; any other error is one of the process."""
        from .worker import Worker

        try:
            if self._worker is None:
                self._worker = Worker(self._model, new_folder())
            return getattr(self._worker, method)(*arguments)
        except MoedgeError as error:
            return Refused(str(error))


def new_folder() -> JobFolder:
    """A folder on this machine for the traces of a worker's crash."""
    return JobFolder(Path(tempfile.gettempdir()) / f"moedge-worker-{uuid4().hex}")


def post_mortem(folder: str, pid: int, kills_before: int) -> bool:
    """On the machine of a worker that died: whether it crashed, so that a row may be to blame; removes its folder.

    `kill -9` and an order of the cluster leave the mark of a living process and no trace.
    """
    traces = JobFolder(Path(folder))
    if not traces.path.is_dir():
        return False
    traced = traces.trace.is_file() and traces.trace.stat().st_size > 0
    crashed = traced or not traces.alive(pid).exists() or memory_kills() > kills_before
    shutil.rmtree(traces.path, ignore_errors=True)
    return crashed
