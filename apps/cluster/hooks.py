"""What the core asks for where a job is for a cluster. Ray is imported when one is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ...face import stage
from .address import refuse_unreachable

if TYPE_CHECKING:
    from ...face import Measured
    from .job import RayCluster

__all__ = ["open_cluster", "refuse_unreachable"]


def open_cluster(measured: Measured) -> AbstractContextManager[RayCluster]:
    """The cluster that the request of a job names. Raises ClusterFailed, MissingExtra, SettingError."""
    with stage("importing Ray"):
        from .job import open_cluster
    return open_cluster(measured)
