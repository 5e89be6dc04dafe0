"""Experts come in the order of turns whatever is asked when, and none that was asked for is lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.moe.streaming_order import ExpertFetchQueue
from moedge.offload.stream.stream import ShardKey
from support.experts.instant_lane import number, opened

LAYERS = 3


def key(turn: int, expert: int) -> ShardKey:
    return ShardKey(turn % LAYERS, expert)


def serve(queue: ExpertFetchQueue, turn: int, most: int) -> list[int]:
    """The experts of a turn as they come, with their own bytes."""
    found = []
    while turn in queue:
        together = queue.arrivals(turn, most)
        for each, arrival in together:
            assert bool((arrival.view == number(each)).all()), "another expert's bytes"
            assert each.layer == turn % LAYERS
            found.append(each.expert)
        for _, arrival in together:
            queue.done([arrival])
    return found


@pytest.mark.sample("50")
@pytest.mark.parametrize("examples", [50, 150])
def test_every_turn_gets_what_was_asked_for_it(examples: int) -> None:
    """Guesses far ahead, wants that were not guessed, guesses that are taken back: in a ring of any size."""
    drawn = given(st.data(), st.integers(3, 9), st.integers(1, 3))(turns_get_what_was_asked)
    settings(max_examples=examples, deadline=None)(drawn)()


def turns_get_what_was_asked(data: st.DataObject, ring_experts: int, most: int) -> None:
    queue, _ = opened(ring_experts)
    asked: dict[int, set[int]] = {turn: set() for turn in range(12)}
    experts = st.sets(st.integers(0, 9), max_size=5)
    for turn in range(10):
        for ahead in (1, 2):
            guess = data.draw(experts) - asked[turn + ahead]
            queue.request(turn + ahead, [key(turn + ahead, expert) for expert in sorted(guess)])
            asked[turn + ahead] |= guess
        wanted = data.draw(experts)
        assert queue.experts(turn) == asked[turn]
        queue.keep(turn, wanted)
        missing = wanted - queue.experts(turn)
        queue.request(turn, [key(turn, expert) for expert in sorted(missing)])
        found = serve(queue, turn, most)
        assert len(found) == len(set(found))
        assert wanted <= set(found) <= wanted | asked[turn]


def test_what_is_not_wanted_and_has_not_begun_is_never_read() -> None:
    queue, lane = opened(3)
    queue.request(1, [key(1, expert) for expert in range(8)])
    queue.keep(1, {7})
    assert sorted(serve(queue, 1, 4)) == [0, 1, 2, 7]
    assert lane.started == ["1/0", "1/1", "1/2", "1/7"]


def test_what_stands_in_the_way_is_asked_for_again() -> None:
    queue, lane = opened(3)
    queue.request(1, [key(1, expert) for expert in range(4)])
    queue.request(0, [key(0, 5)])
    assert serve(queue, 0, 4) == [5]
    assert serve(queue, 1, 4) == [0, 1, 2, 3]
    assert lane.started[:3] == ["1/0", "1/1", "1/2"]


def test_a_turn_without_anything_is_not_waited_for() -> None:
    queue, _ = opened(3)
    assert 0 not in queue
    with pytest.raises(IndexError):
        queue.arrivals(0, 4)
