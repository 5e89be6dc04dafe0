"""What the installed transformers has: tests of what it lacks are skipped."""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

from moedge.runtime.shape.families import SINCE, WRAPPERS

# What the tables of this repository were generated from.
NEWEST = max(SINCE.values(), key=Version)


def needs_transformers(release: str) -> pytest.MarkDecorator:
    """Skips a test where transformers is older than `release`."""
    found = version("transformers")
    return pytest.mark.skipif(Version(found) < Version(release), reason=f"transformers {found} is older than {release}")


def installed(families: Iterable[str]) -> list[Any]:
    """The families as parameters of a test, those skipped that the installed transformers does not run.

    Model types that wrap a family's text model need what that family needs.
    """
    since = {each: SINCE.get(WRAPPERS.get(each, each)) for each in families}
    return [pytest.param(each, marks=needs_transformers(release) if release else ()) for each, release in since.items()]
