"""A bad address of a cluster, or a missing Ray, is refused within seconds and with a sentence."""

import socket
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

from moedge.apps.cluster import address
from moedge.runtime.settings.errors import ClusterFailed, MissingExtra


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray as far as it is asked here: it is installed, and this program has no cluster."""
    for name in ("ray", "ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of somebody who accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_without_ray_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"needs Ray, which is not installed: .*install .*ray"):
        address.refuse_unreachable("10.0.0.5:6379")
    with pytest.raises(MissingExtra):
        address.import_ray()


@pytest.mark.usefixtures("fake_ray")
@pytest.mark.parametrize(
    "given", ["nonsense", "10.0.0.5", "10.0.0.5:", ":6379", "ray://10.0.0.5:10001", "a:b", "h:99999"]
)
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(ClusterFailed, match=r"^--ray .*: no cluster answers there .*HOST:PORT of the cluster's head"):
        address.refuse_unreachable(given)


@pytest.mark.usefixtures("fake_ray")
def test_an_address_where_nobody_listens_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ClusterFailed, match="Connection refused"):
        address.refuse_unreachable(nobody)


@pytest.mark.usefixtures("fake_ray")
def test_somebody_who_is_no_cluster_is_not_waited_for(listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_TRY", "import time; time.sleep(60)")
    monkeypatch.setattr(address, "_ANSWER_SECONDS", 0.2)
    with pytest.raises(ClusterFailed, match="does not answer as a cluster does"):
        address.refuse_unreachable(listener)


@pytest.mark.usefixtures("fake_ray")
def test_what_ray_says_of_a_cluster_is_passed_on(listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_TRY", "raise RuntimeError('Version mismatch: 2.44')")
    with pytest.raises(ClusterFailed, match=r"RuntimeError: Version mismatch: 2\.44"):
        address.refuse_unreachable(listener)
    monkeypatch.setattr(address, "_TRY", "pass")
    address.refuse_unreachable(listener)


@pytest.mark.usefixtures("fake_ray")
def test_a_local_cluster_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_TRY", "raise SystemExit(1)")
    address.refuse_unreachable("local")


@pytest.mark.usefixtures("fake_ray")
def test_a_cluster_that_asks_for_a_token_is_named(listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: missing or incorrect"
    monkeypatch.setattr(address, "_TRY", f"import sys; sys.exit({words!r})")
    with pytest.raises(ClusterFailed, match="asks for its token: set RAY_AUTH_MODE=token"):
        address.refuse_unreachable(listener)
