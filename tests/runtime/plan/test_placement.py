"""Which layers keep their linears (`ModelShards.dense_order`): while they compute, those of the others arrive."""

from itertools import pairwise
from typing import Any

import pytest

from moedge.runtime.plan.placement import Placement, everything
from moedge.runtime.shape.shards import LayerShards, ModelShards, ShardLayout
from support.device.link_events import LayerWork, PassWork, Seconds, Simulation

NBYTES = 7 * 4096
# Of published models, and odd ones.
COUNTS = (1, 2, 5, 16, 28, 30, 36, 61, 80, 94, 126)


def model(count: int, held: int = 0) -> ModelShards:
    dense: Any = ShardLayout(())
    object.__setattr__(dense, "nbytes", NBYTES)
    return ModelShards((LayerShards(dense, None, 0),) * count, None, held)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("held", [0, 1])
def test_layers_that_stream_are_spread_over_the_model(count: int, held: int) -> None:
    order = model(count, held).dense_order
    assert sorted(order) == list(range(count))
    assert list(order[:held]) == list(range(held))
    for kept in range(held, count):
        streamed = sorted(order[kept:])
        # Passes follow one another.
        gaps = [after - before for before, after in pairwise([*streamed, streamed[0] + count])]
        assert max(gaps) <= 2 * -(-count // len(streamed)) + held


def pass_s(shards: ModelShards, kept: int, bytes_s: float, layer_s: float) -> float:
    """Of a simulated pass with rings for two layers."""
    streamed = set(shards.dense_order[kept:])
    layers = tuple(
        LayerWork(NBYTES if index in streamed else 0, 0, 0, 0, 0, layer_s, 0.0, 0.0, 0.0)
        for index in range(len(shards.layers))
    )
    return Simulation(PassWork(layers, 0, 2 * NBYTES, 4096, 4096, Seconds(0, 0, 0)), bytes_s).run(4)


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("kept", [14, 20, 24])
def test_the_link_is_busy_while_held_layers_compute(kept: int, planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the first layers held, both take turns."""
    if planted:
        monkeypatch.setattr(ModelShards, "dense_order", property(lambda shards: tuple(range(len(shards.layers)))))
    shards, bytes_s = model(30), 1e9
    link_s = (30 - kept) * NBYTES / bytes_s
    took = pass_s(shards, kept, bytes_s, layer_s=0.8 * link_s / 30)
    assert (took > 1.3 * link_s) if planted else (took < 1.06 * link_s)


def test_a_placement_counts_the_bytes_of_its_layers() -> None:
    shards = model(30)
    assert Placement(7, (0,) * 30, 2 * NBYTES, 0).nbytes(shards) == 9 * NBYTES
    assert everything(shards).held_nbytes(shards) == 30 * NBYTES
