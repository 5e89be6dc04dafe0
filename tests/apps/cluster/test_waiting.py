"""What a user is told while no worker of a cluster runs, and that a signal ends the wait (`apps/cluster/workers.py`,
`apps/cluster/job.py`); without Ray.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from moedge.apps.cluster import workers as clusters
from moedge.apps.cluster.job import RayCluster
from moedge.apps.cluster.worker import WorkerInfo
from moedge.apps.cluster.workers import ClusterSize, Workers
from moedge.runtime.settings.stages import Advance, Stage, watching

INFO = WorkerInfo("host:1", 1, "/nowhere", 0)


class Interrupted(BaseException):
    """What a signal's handler raises."""


class FakeRay:
    """A cluster that starts no worker. `on_wait` happens in every wait for an answer."""

    def __init__(self) -> None:
        self.free = {"CPU": 0.0}
        self.on_wait = lambda: None

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 4.0}, "NodeManagerAddress": "a"}]

    def available_resources(self) -> dict[str, float]:
        return self.free

    def remote(self, **_: Any) -> Any:
        actor = SimpleNamespace(hello=SimpleNamespace(remote=lambda facts: object()))
        return lambda what: SimpleNamespace(remote=lambda *_: actor)

    def wait(self, refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        self.on_wait()
        return [], refs


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    found = FakeRay()
    monkeypatch.setattr(clusters, "import_ray", lambda: found)
    monkeypatch.setattr(clusters, "connect", lambda *_: False)
    monkeypatch.setattr(clusters, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(clusters, "_LOOK_SECONDS", 0.0)
    return found


@pytest.mark.parametrize(
    ("size", "free", "words"),
    [
        (ClusterSize(1, 8, 0, 1), {"CPU": 4.0}, "each takes 8 CPUs of one node, and no node of the cluster has them"),
        (ClusterSize(1, 2, 1, 1), {"CPU": 4.0}, "each takes 2 CPUs and 1 GPU of one node, and no node"),
        (ClusterSize(1, 2, 0, 1), {"CPU": 1.0}, "each takes 2 CPUs, and the cluster's are all used"),
        (
            ClusterSize(1, 1, 0, 1),
            {"CPU": 2.0},
            "1 CPU of the cluster are free.*before it began: killed",
        ),
    ],
)
def test_a_line_says_what_is_missing(size: ClusterSize, free: dict[str, float], words: str, ray: FakeRay) -> None:
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(size.lack(ray.nodes(), free, "killed"))


def test_workers_that_must_wait_for_nodes_are_counted(ray: FakeRay) -> None:
    assert ClusterSize(5, 2, 0, 5).without_space(ray.nodes()).startswith("the cluster has space for 2 of 5 workers")
    assert ClusterSize(2, 2, 0, 2).without_space(ray.nodes()) == ""


def test_the_line_stands_until_a_worker_runs_and_the_stage_goes_on(ray: FakeRay) -> None:
    workers, shown, steps = Workers("model", "auto", 1, False), list[Stage](), []
    cluster = RayCluster(workers)
    workers.start({})

    @contextmanager
    def watch(stage: Stage) -> Iterator[Advance]:
        shown.append(stage)
        yield lambda nbytes: None

    def step() -> None:
        steps.append(len(shown))
        if len(steps) == 3:
            workers.slots[0].info = INFO

    cluster.step = step  # type: ignore[method-assign]
    with watching(watch):
        cluster._wait("starting workers", lambda: len(steps) == 5)
    assert [each.doing for each in shown] == ["waiting for a worker", "starting workers"]
    assert "each takes 4 CPUs" in shown[0].announcement
    assert shown[1].announcement == ""
    cluster.note_lack()
    workers.slots[0].dead = True
    for _ in range(3):
        cluster.note_lack()
    (said,) = cluster.left_out
    assert str(said) == shown[0].announcement


def test_a_signal_ends_the_wait_although_ray_wraps_what_its_handler_raises(ray: FakeRay) -> None:
    workers = Workers("model", "auto", 1, False)
    workers.start({})

    def interrupt() -> None:
        raise SystemError("returned a result with an exception set") from Interrupted()

    ray.on_wait = interrupt
    with pytest.raises(Interrupted):
        workers.poll(RayCluster(workers), 1.0)
