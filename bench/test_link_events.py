"""The simulation of passes (`tests/support/device/link_events.py`) against what no pass can beat, and where nothing
overlaps."""

from dataclasses import replace

import pytest

from support.device.link_events import LayerWork, PassWork, Seconds, Simulation

LINK = 1e9
# Sizes of a page and less; an expert takes three, a window holds three layers of a cohort.
LAYER = LayerWork(
    dense_nbytes=8192, arriving=7, expert_nbytes=12288, cohort_nbytes=20480, down_nbytes=4096, dense_s=3e-6,
    attention_s=9e-6, experts_s=14e-6, arriving_s=7e-6,
)  # fmt: skip
PASS = PassWork(
    (LAYER,) * 5, cohorts=3, dense_ring=16384, expert_ring=8 * 12288, window_ring=3 * 20480,
    seconds=Seconds(layers=0, attention=0, beside=11e-6),
)  # fmt: skip


def up_s(work: PassWork, bytes_s: float) -> float:
    sizes = (
        layer.dense_nbytes + layer.arriving * layer.expert_nbytes + work.cohorts * layer.cohort_nbytes
        for layer in work.layers
    )
    return sum(sizes) / bytes_s


def computing_s(work: PassWork, bytes_s: float) -> float:
    """Copies down are compute's."""
    down = sum(layer.down_nbytes for layer in work.layers) / bytes_s if work.cohorts else 0
    return work.seconds.beside + down + sum(each.dense_s + each.attention_s + each.experts_s for each in work.layers)


@pytest.mark.parametrize("cohorts", [0, 1, 3])
@pytest.mark.parametrize("bytes_s", [LINK / 50, LINK, 3 * LINK, 1e15])
@pytest.mark.parametrize("eager", [True, False])
def test_a_pass_takes_no_less_than_link_or_compute_and_no_more_than_both(
    cohorts: int, bytes_s: float, eager: bool
) -> None:
    work = replace(PASS, cohorts=cohorts, seconds=replace(PASS.seconds, eager=eager))
    took = Simulation(work, bytes_s).run(6)
    up, computing = up_s(work, bytes_s), computing_s(work, bytes_s)
    # Where rings end, copies are late by other amounts in each pass.
    assert max(up, computing) * (1 - 5e-3) <= took <= up + computing
    if up < computing / 100:
        assert took == pytest.approx(computing, rel=0.02)
    if computing < up / 9:
        assert took == pytest.approx(up, rel=0.03)


def test_with_room_for_one_layer_nothing_overlaps() -> None:
    """A copy begins when what came before it was computed; computing a layer's linears waits for nothing else."""
    work = replace(PASS, dense_ring=8192, expert_ring=12288, window_ring=20480)
    alone = replace(work, layers=tuple(replace(layer, dense_nbytes=0) for layer in work.layers), cohorts=0)
    took = Simulation(alone, LINK).run(6)
    # The first expert of a layer arrives while its linears and attention are computed.
    waits = (LAYER.arriving - 1) * LAYER.expert_nbytes / LINK
    assert took == pytest.approx(computing_s(alone, LINK) + 5 * waits)
    assert Simulation(work, LINK).run(6) > 1.05 * Simulation(PASS, LINK).run(6)


def test_a_window_for_one_layer_takes_longer() -> None:
    """Negative control: larger ones gain no more than a copy that is late."""
    one, *more = [Simulation(replace(PASS, window_ring=count * 20480), LINK).run(6) for count in (1, 2, 3, 6)]
    assert one > 1.02 * max(more)
    assert max(more) == pytest.approx(min(more), rel=0.01)


@pytest.mark.parametrize("disk", [LINK / 50, LINK / 3, 20 * LINK])
@pytest.mark.parametrize("read", [0, 3, 7])
def test_a_disk_binds_where_it_takes_longest(disk: float, read: int) -> None:
    layers = (replace(LAYER, read=read, dense_read=True),) * 5
    work = replace(PASS, layers=layers, disk_bytes_s=disk, dense_staging=16384, expert_staging=8 * 12288)
    took = Simulation(work, LINK).run(6)
    reading = sum(each.dense_nbytes + read * each.expert_nbytes for each in layers) / disk
    moving, computing = up_s(work, LINK), computing_s(work, LINK)
    assert max(reading, moving, computing) * (1 - 1e-9) <= took <= reading + moving + computing
    if reading > 9 * (moving + computing):
        assert took == pytest.approx(reading, rel=0.02)


def test_reads_wait_for_memory_that_copies_have_left() -> None:
    """With staging for one expert a read and its copy take turns: the disk does nothing while the link copies it."""
    layers = (replace(LAYER, dense_nbytes=0, read=7),) * 5
    work = replace(PASS, layers=layers, cohorts=0, dense_ring=0, disk_bytes_s=LINK, dense_staging=0)
    one, many = (Simulation(replace(work, expert_staging=count * 12288), LINK).run(6) for count in (1, 8))
    turns = 5 * 7 * 2 * LAYER.expert_nbytes / LINK
    assert one >= turns * (1 - 1e-9) > many
