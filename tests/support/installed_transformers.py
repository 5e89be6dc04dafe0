"""What the installed transformers has: tests of what it lacks are skipped."""

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version

from moedge.runtime.shape.families import SINCE

# What the tables of this repository were generated from.
NEWEST = max(SINCE.values(), key=Version)


def needs_transformers(release: str) -> pytest.MarkDecorator:
    """Skips a test where transformers is older than `release`."""
    found = version("transformers")
    return pytest.mark.skipif(Version(found) < Version(release), reason=f"transformers {found} is older than {release}")


def installed(families: Iterable[str]) -> list[Any]:
    """The families as parameters of a test, those skipped that the installed transformers does not run."""
    return [pytest.param(each, marks=needs_transformers(SINCE[each]) if each in SINCE else ()) for each in families]
