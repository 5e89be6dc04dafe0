"""Whether Ray is installed, and a cluster answers at an address: asked before a job's rows are read. Torch-free."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from ...face import errors

LOCAL, AUTO = "local", "auto"
# Until somebody at an address accepts a connection, and until a cluster has answered.
_ACCEPT_SECONDS, _ANSWER_SECONDS = 5.0, 30.0
_ADVICE = f"give HOST:PORT of the cluster's head (`ray start --head` prints it), {AUTO}, or {LOCAL}"
# Ray itself tries for ten minutes, and nothing can interrupt it; a process can be ended.
_TRY = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')"
# Of a cluster of this machine only: a process that stands still, on a machine that was suspended, is not dead.
_PATIENT = {"health_check_timeout_ms": 24 * 3600 * 1000}


def import_ray() -> Any:
    """The package. Raises MissingExtra."""
    # Nothing is sent anywhere, unless the user asked for it.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise errors.MissingExtra("--ray needs Ray", "ray") from None
    return ray


def refuse_unreachable(address: str) -> None:
    """Raises ClusterFailed where no cluster answers at `address`, MissingExtra without Ray."""
    if address == LOCAL or import_ray().is_initialized():
        return
    if address != AUTO:
        _connect_once(address)
    try:
        found = subprocess.run(
            [sys.executable, "-c", _TRY, address], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        _refuse_without_token(address, str(error.stderr))
        raise _failed(address, "whoever listens there does not answer as a cluster does") from None
    if found.returncode:
        _refuse_without_token(address, found.stderr)
        raise _failed(address, _last_line(found.stderr))


def _connect_once(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise _failed(address, "this is no HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ACCEPT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _failed(address, str(error)) from None


def _refuse_without_token(address: str, stderr: str) -> None:
    """`ray start` asks for a token wherever one lies, and a program that names an address sends none by itself."""
    if "InvalidAuthToken" in stderr or "AuthenticationError" in stderr:
        raise errors.ClusterFailed(
            f"--ray {address}: the cluster asks for its token: set RAY_AUTH_MODE=token for this command, and copy the "
            f"head's ~/.ray/auth_token to this machine; on the head itself, --ray {AUTO} is enough"
        )


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "Ray says nothing")


def _failed(address: str, why: str) -> errors.ClusterFailed:
    return errors.ClusterFailed(f"--ray {address}: no cluster answers there ({why}); {_ADVICE}")


def connect(ray: Any, address: str) -> bool:
    """Whether the connection is ours to end: a program that has one shares it. Raises ClusterFailed."""
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        cpus = len(os.sched_getaffinity(0))
        options |= {"include_dashboard": False, "num_cpus": cpus, "_system_config": _PATIENT}
    main = threading.current_thread() is threading.main_thread()
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
    except Exception as error:
        raise _failed(address, str(error)) from None
    if main and on_terminate is not None:
        # Ray exits at once; a job stops after its pass.
        signal.signal(signal.SIGTERM, on_terminate)
    # Ray prints what it thinks of dead workers to standard output, where answers go; its logs have it, too.
    if hasattr(ray._private.worker, "print_to_stdstream"):
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
    return True
