"""Replays over a routing that is made up: what each policy and predictor must find in it."""

import numpy as np
import pytest

from bench import routing, row_order

LAYERS, EXPERTS = 3, 8


def made_up(follows: bool) -> list[routing.Turn]:
    """Passes of two tokens, whose experts follow those of the layer before (or are drawn), and are not seen ahead."""
    generator, shift = np.random.default_rng(0), np.array([3, 5, 0, 7, 1, 6, 2, 4])
    found = []
    for _ in range(200):
        ids = np.stack([generator.permutation(EXPERTS)[:2] for _ in range(2)])
        for layer in range(LAYERS):
            if layer:
                ids = shift[ids] if follows else np.stack([generator.permutation(EXPERTS)[:2] for _ in range(2)])
            found.append(
                routing.Turn(layer, ids, ids if layer and not follows else (ids + 1) % EXPERTS if layer else None)
            )
    return found


@pytest.mark.parametrize(("follows", "best"), [(True, 1), (False, 0)])
def test_the_predictor_that_knows_is_found(follows: bool, best: int, capsys: pytest.CaptureFixture[str]) -> None:
    routing.print_forecasts("made up", made_up(follows), LAYERS, EXPERTS, 0.5, 1.0)
    cells = capsys.readouterr().out.split("|")[3:-1]
    right = [int(each.strip(" %")) for each in cells[::2]]
    assert right[best] > 75
    assert max(right[:best] + right[best + 1 :]) < right[best] - 15


def test_what_is_read_a_token_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """All experts in every pass: lru reads all of them, the others what they do not hold."""
    every = np.arange(EXPERTS).reshape(2, 4)
    trace = [routing.Turn(layer, every, every if layer else None) for _ in range(50) for layer in range(LAYERS)]
    routing.print_bytes("scan", trace, LAYERS, EXPERTS, 0.5, 1_000_000, 2.0)
    fixed, lru, popular, belady, auto, everything = map(float, capsys.readouterr().out.split("|")[3:-2])
    assert fixed == popular == auto == everything == LAYERS * EXPERTS / 2 / 2
    assert lru == pytest.approx(2 * fixed, rel=0.02)
    assert belady <= fixed


def test_an_order_by_routing_finds_rows_that_share_experts() -> None:
    """Rows of two kinds in turn, each kind with half of the experts: what their prompts chose tells them apart, and
    their tokens, which are drawn, do not."""
    generator = np.random.default_rng(0)
    halves = np.arange(16) % 2 * (EXPERTS // 2)
    ids = halves[:, None, None] + generator.integers(0, EXPERTS // 2, (LAYERS, 16, 24, 2))
    texts = generator.integers(0, 5000, (16, 8))
    found = row_order.orders(texts, ids[:, :, :8], 2, EXPERTS)
    assert all(sorted(order) == list(range(16)) for order in found.values())
    wanted = {way: row_order.reads(ids[:, order, 8:], 8, EXPERTS, 0.5)[0] for way, order in found.items()}
    assert wanted["routing"] == wanted["kinds"] == pytest.approx(0.5, abs=0.02)
    assert wanted["given"] > 0.85
    assert wanted["alike"] > 0.7
