"""The library of CPU kernels under every instruction set that this processor has."""

from collections.abc import Iterator

import pytest

from moedge.quant.native import library
from moedge.quant.native.build import SETS


@pytest.fixture(params=list(SETS))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor has."""
    found = library.loaded()
    if found.library is None:
        pytest.skip(found.lack)
    chosen = library.choose(found.library, request.param)
    yield chosen
    library.choose(found.library, found.isa)
    if chosen != request.param:
        pytest.skip(f"this processor has no more than {chosen}")
