"""The writer's laws: arrival order changes no byte, and nothing appears before it is whole."""

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.runtime.jobs.outputs import OutputPaths
from moedge.runtime.jobs.refusals import OutputExists
from moedge.runtime.jobs.writer import OrderedWriter

NUM_ROWS = 9


@pytest.fixture
def paths(tmp_path: Path) -> OutputPaths:
    return OutputPaths(tmp_path / "out.jsonl")


def names(paths: OutputPaths) -> list[str]:
    return sorted(path.name for path in paths.out.parent.iterdir())


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@given(order=st.permutations(range(NUM_ROWS)), failed=st.sets(st.integers(0, NUM_ROWS - 1)))
def test_any_order_of_arrival_gives_the_same_files(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], failed: set[int]
) -> None:
    paths = OutputPaths(tmp_path_factory.mktemp("job") / "out.jsonl")
    with OrderedWriter(paths) as writer:
        for index in order:
            writer.add(index, f"row {index}", index in failed)
        assert not paths.out.exists()
        writer.finish(NUM_ROWS)
    assert lines(paths.out) == [f"row {i}" for i in range(NUM_ROWS) if i not in failed]
    assert (lines(paths.errors) if failed else []) == [f"row {i}" for i in sorted(failed)]
    assert names(paths) == ["out.errors.jsonl", "out.jsonl"][not failed :]


@given(
    order=st.permutations(range(NUM_ROWS)), count=st.integers(0, NUM_ROWS), failed=st.sets(st.integers(0, NUM_ROWS - 1))
)
def test_a_stopped_job_leaves_every_finished_row_in_order_also_behind_gaps(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], count: int, failed: set[int]
) -> None:
    paths = OutputPaths(tmp_path_factory.mktemp("job") / "out.jsonl")
    with OrderedWriter(paths) as writer:
        for index in order[:count]:
            writer.add(index, f"row {index}", index in failed)
        writer.finish_partial()
    assert lines(paths.partial) == [f"row {i}" for i in sorted(order[:count])]
    assert names(paths) == ["out.partial.jsonl"]


def test_rows_in_order_are_not_held_in_memory(paths: OutputPaths) -> None:
    line, num_rows = "x" * 100_000, 100
    with OrderedWriter(paths) as writer:
        tracemalloc.start()
        for index in range(num_rows):
            writer.add(index, line)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        writer.finish(num_rows)
    assert paths.out.stat().st_size == num_rows * (len(line) + 1)
    assert peak < 10 * len(line)


def test_a_job_that_breaks_off_leaves_nothing_behind(paths: OutputPaths) -> None:
    with OrderedWriter(paths) as writer:
        writer.add(0, "x")
        writer.add(2, "x")
        assert len(names(paths)) == 2
    assert names(paths) == []


def test_a_row_is_written_once(paths: OutputPaths) -> None:
    with OrderedWriter(paths) as writer:
        writer.add(0, "x")
        writer.add(2, "x")
        for index in (0, 2):
            with pytest.raises(ValueError, match="written before"):
                writer.add(index, "x")


def test_a_job_with_missing_rows_is_not_finished(paths: OutputPaths) -> None:
    with OrderedWriter(paths) as writer:
        writer.add(0, "x")
        writer.add(2, "x")
        for num_rows in (2, 3, 4):
            with pytest.raises(ValueError, match="2 were finished"):
                writer.finish(num_rows)
        writer.add(1, "x")
        writer.finish(3)


def test_a_file_that_appears_meanwhile_is_kept_and_so_is_the_work(paths: OutputPaths) -> None:
    with OrderedWriter(paths) as writer:
        writer.add(0, "mine")
        paths.out.write_text("theirs")
        with pytest.raises(OutputExists):
            writer.finish(1)
        writer.finish_partial()
    assert paths.out.read_text() == "theirs"
    assert lines(paths.partial) == ["mine"]


def test_the_end_of_the_job_removes_the_partial_file_of_an_earlier_stop(paths: OutputPaths) -> None:
    with OrderedWriter(paths) as writer:
        writer.finish_partial()
    with OrderedWriter(paths) as writer:
        writer.finish(0)
    assert names(paths) == ["out.jsonl"]


def test_a_second_job_for_the_same_name_does_not_touch_the_files_of_a_dead_one(paths: OutputPaths) -> None:
    stale = paths.out.with_name(".out.jsonl.0.tmp")
    stale.write_text("half a row")
    with OrderedWriter(paths) as writer:
        writer.add(0, "x")
        writer.finish(1)
    assert lines(paths.out) == ["x"]
    assert stale.read_text() == "half a row"
