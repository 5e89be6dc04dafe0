"""Layers that a device replays as CUDA graphs (`runtime/model/graphs.py`) give the tokens that they give one kernel
after the other; what may not be replayed is not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from moedge.runtime.loading import engine_loader as load
from moedge.runtime.model import graphs
from moedge.runtime.model.graphs import LayerGraphs, rounded
from moedge.runtime.plan.candidate import GRAPH_ROWS, GRAPH_SIZES

AMPERE = (8, 6)


def test_rows_are_rounded_by_an_eighth_at_most() -> None:
    for rows in range(1, GRAPH_ROWS + 1):
        assert rows <= rounded(rows) <= min(GRAPH_ROWS, rows * 9 / 8)
    assert [rounded(rows) for rows in (1, 16, 17, 100, 384, 385)] == [1, 16, 18, 104, 384, 416]


def short(tiny: Any, **changed: Any) -> Any:
    """Three sequences whose prompts are read together, and that end one after the other."""
    settings = replace(tiny.settings, deterministic=False, tokens_per_pass=32, max_sequences=3, **changed)
    return replace(tiny, settings=settings, lengths=(2, 5, 3), new_tokens=6)


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows are computed as four."""
    monkeypatch.setattr(graphs, "rounded", lambda rows: -(-rows // 4) * 4)


class Recorded:
    """The graphs of the engines that are loaded while it is entered."""

    def __init__(self) -> None:
        self.graphs: list[LayerGraphs] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        made = LayerGraphs.__init__

        def noted(this: LayerGraphs, *arguments: Any) -> None:
            made(this, *arguments)
            self.graphs.append(this)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LayerGraphs, "__init__", noted)
            yield


def run(tiny: Any, fake: Any, temperature: float = 0.0) -> tuple[Any, LayerGraphs]:
    """Tokens with everything held, and the graphs that computed them."""
    recorded, plan = Recorded(), tiny.plan(fake.device, 1.0)
    assert plan.graphs_nbytes > 0
    with fake, recorded.watching():
        ran = tiny.run(plan, fake.device, temperature)
    return ran, recorded.graphs[0]


@pytest.mark.parametrize(
    ("family", "quant", "kv"),
    [
        ("llama", "int8", "bf16"),
        pytest.param("qwen3_moe", "nf4", "int8", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "int8", "int4", marks=pytest.mark.slow),
        pytest.param("mixtral", "int4", "bf16", marks=pytest.mark.slow),
        pytest.param("gemma3_text", "int8", "int8", marks=pytest.mark.slow),
        pytest.param("olmoe", "mxfp4", "bf16", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_processor(
    family: str, quant: str, kv: str, case: Any, fakes: ModuleType, sizes: None
) -> None:
    tiny, fake = short(case(family, quant), kv=kv), fakes.FakeDevice(5, capability=AMPERE)
    ran, found = run(tiny, fake)
    assert found.lack == ""
    # Recorded in the third pass of three rows, and replayed in the others.
    assert found.replayed == 2 * len(found.layers) > 0
    assert ran.tokens == tiny.run(tiny.plan(None)).tokens


# What a device with a graph may do wrong, and how it is done here.
def _stale_arguments(patch: pytest.MonkeyPatch) -> None:
    """Positions of the pass that was recorded."""
    static = graphs._GraphedPass._static

    def kept(self: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and self._graphs._recorded:
            return value
        return static(self, value)

    patch.setattr(graphs._GraphedPass, "_static", kept)


def _stale_hidden(patch: pytest.MonkeyPatch) -> None:
    """The embedding of the pass that was recorded."""
    fill = graphs._GraphedPass._fill

    def skipped(self: Any, rows: Any, found: Any) -> None:
        if not self._graphs._recorded or found.dim() != 2 or self._filled:
            fill(self, rows, found)
        self._filled = True

    patch.setattr(graphs._GraphedPass, "_filled", False, raising=False)
    patch.setattr(graphs._GraphedPass, "_fill", skipped)


def _operands_left_behind(patch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values are copied when a layer is recorded, not when it is replayed."""
    attend = graphs._GraphedPass.attend

    def direct(self: Any, call: Any, q: Any, k: Any, v: Any, batch: Any) -> Any:
        if self._recording is None:
            return attend(self, call, q, k, v, batch)
        recording, self._recording = self._recording, None
        recording.end()
        out = attend(self, call, q, k, v, batch)
        names = zip("qkv", (q, k, v), strict=True)
        recording.parts.append(graphs._Attends(call, tuple(self._graphs.buffer(*each) for each in names)))
        self._recording = recording
        recording.begin()
        return out

    patch.setattr(graphs._GraphedPass, "attend", direct)


def _another_layers_attention(patch: pytest.MonkeyPatch) -> None:
    """Every layer's keys go to the first one's place."""
    run = graphs._GraphedPass._run

    def first(self: Any, step: Any) -> Any:
        if self._recording is None and self._graphs._recorded:
            step = step._replace(call=replace(step.call, layer=0))
        return run(self, step)

    patch.setattr(graphs._GraphedPass, "_run", first)


def _not_attended(patch: pytest.MonkeyPatch) -> None:
    """Only graphs are replayed."""

    def graphs_alone(self: Any, recorded: list[Any]) -> None:
        for part in recorded:
            if not isinstance(part, graphs._Attends):
                part.replay()
        self._graphs.replayed += 1

    patch.setattr(graphs._GraphedPass, "_replay", graphs_alone)


def _half_a_layer(patch: pytest.MonkeyPatch) -> None:
    """The part behind attention is left out."""

    def first_half(self: Any, recorded: list[Any]) -> None:
        recorded[0].replay()
        self._run(recorded[1])
        self._graphs.replayed += 1

    patch.setattr(graphs._GraphedPass, "_replay", first_half)


def _layers_exchanged(patch: pytest.MonkeyPatch) -> None:
    """A layer replays another one's graphs."""
    keep = LayerGraphs.keep
    patch.setattr(LayerGraphs, "keep", lambda self, rows, index, parts: keep(self, rows, 1 - index, parts))


def _padding_attends(patch: pytest.MonkeyPatch) -> None:
    """Rows behind the pass's are attended to, too: they are stored where tokens are."""

    def all_rows(self: Any, step: Any) -> Any:
        q, k, v = (each[1 : self._count + 1] for each in step.operands)
        out = self._graphs.buffer("attended", q)[: self.num_tokens]
        self._fill(out, self._attention.attend(step.call, q, k, v, self._batch))
        return out

    patch.setattr(graphs._GraphedPass, "_run", all_rows)


def _never_tried(patch: pytest.MonkeyPatch) -> None:
    """A graph of other numbers is kept: nobody compares it."""
    patch.setattr(graphs, "_BOUND", float("inf"))
    end = graphs._Recording.end

    def doubled(self: Any) -> None:
        end(self)
        replay = self.parts[-1].replay
        self.parts[-1].replay = lambda: (replay(), self.memory.mul_(1.1))

    patch.setattr(graphs._Recording, "memory", None, raising=False)
    record = graphs._GraphedPass._record

    def noted(self: Any, index: int, run: Any, state: Any, wanted: Any) -> None:
        graphs._Recording.memory = state  # type: ignore[attr-defined]
        record(self, index, run, state, wanted)

    patch.setattr(graphs._GraphedPass, "_record", noted)
    patch.setattr(graphs._Recording, "end", doubled)


def _results_alone(patch: pytest.MonkeyPatch) -> None:
    """What a layer gives stays where the graph left it, not where the next layer looks."""

    def recorded(self: Any, index: int, run: Any, state: Any, wanted: Any) -> None:
        main, parts = torch.cuda.current_stream(), []  # type: ignore[var-annotated]
        self._recording = graphs._Recording(self._graphs._pool, self._graphs._side, main, parts)
        self._recording.begin()
        run()
        self._recording.end()
        self._recording = None
        self._graphs.keep(self.num_tokens, index, parts)

    patch.setattr(graphs._GraphedPass, "_record", recorded)


BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [
    _stale_arguments, _stale_hidden, _operands_left_behind, _another_layers_attention, _not_attended, _half_a_layer,
    _layers_exchanged, _padding_attends, _never_tried, _results_alone,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__.strip("_"))
def test_planted_bugs_are_found(
    bug: Callable[[pytest.MonkeyPatch], None],
    case: Any,
    fakes: ModuleType,
    sizes: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny, fake = short(case("qwen3_moe", "nf4"), kv="int8"), fakes.FakeDevice(5, capability=AMPERE)
    wanted = tiny.run(tiny.plan(None)).tokens
    bug(monkeypatch)
    try:
        ran, found = run(tiny, fake)
    except (RuntimeError, fakes.simulator.Race):
        return
    assert found.replayed > 0 or found.lack, "the bug was there"
    assert ran.tokens != wanted or found.lack


@pytest.mark.slow
@pytest.mark.parametrize("way", ["refused", "other numbers"])
def test_where_recording_fails_kernels_are_launched_one_by_one(
    way: str, case: Any, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, fake = short(case("qwen3_moe", "nf4"), kv="int8"), fakes.FakeDevice(5, capability=AMPERE)
    if way == "refused":
        begin = fakes.Graph.capture_begin

        def refuse(self: Any, *arguments: Any, **options: Any) -> None:
            begin(self, *arguments, **options)
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more")

        monkeypatch.setattr(fakes.Graph, "capture_begin", refuse)
    else:
        record = graphs._GraphedPass._record

        def compared(self: Any, index: int, run: Any, state: Any, wanted: Any) -> None:
            record(self, index, run, state, wanted + 1.0)

        monkeypatch.setattr(graphs._GraphedPass, "_record", compared)
    ran, found = run(tiny, fake)
    assert ran.tokens == tiny.run(tiny.plan(None)).tokens
    assert found.replayed == 0
    assert ("not permitted when stream is capturing" if way == "refused" else "of") in found.lack
    assert "and more" not in found.lack


def test_what_is_used_least_lately_is_dropped(fakes: ModuleType) -> None:
    with fakes.FakeDevice(capability=AMPERE) as fake:
        found = LayerGraphs([torch.nn.Identity()], fake.torch_device, GRAPH_ROWS, GRAPH_SIZES)
        for rows in range(1, GRAPH_SIZES + 3):
            for layer in (0, 1):
                found.keep(rows, layer, [rows])
        assert list(found._recorded) == list(range(3, GRAPH_SIZES + 3))
        assert found._recorded[4] == {0: [4], 1: [4]}


@pytest.mark.parametrize(
    ("changed", "share"), [({"deterministic": True}, 1.0), ({"attention": "torch"}, 1.0), ({}, 0.3)]
)
def test_layers_that_wait_or_move_are_not_recorded(
    changed: dict[str, Any], share: float, case: Any, fakes: ModuleType
) -> None:
    tiny = short(case("qwen3_moe", "nf4"))
    tiny = replace(tiny, settings=replace(tiny.settings, **changed))
    fake = fakes.FakeDevice(capability=AMPERE)
    assert tiny.plan(fake.device, share).graphs_nbytes == 0


def test_an_argument_that_may_change_is_not_recorded(case: Any, fakes: ModuleType) -> None:
    """A layer that gets something that is no constant, or a tensor that has no row for each token."""
    with fakes.FakeDevice(capability=AMPERE) as fake:
        found = LayerGraphs([torch.nn.Identity()], fake.torch_device, GRAPH_ROWS, GRAPH_SIZES)
        one = graphs._GraphedPass(found, type("Batch", (), {"num_tokens": 3})(), None)  # type: ignore[arg-type]
        for value in (object(), [1], torch.ones(1, 4, 2), torch.ones(3)):
            with pytest.raises(graphs._NotRecordable):
                one._static(value)
        assert one._static((None, True, 2.5, "x")) == (None, True, 2.5, "x")


def test_the_kernels_of_a_run_name_graphs(case: Any, fakes: ModuleType) -> None:
    tiny, fake = short(case("qwen3_moe", "nf4"), kv="bf16"), fakes.FakeDevice(5, capability=AMPERE)
    plan = tiny.plan(fake.device, 1.0)
    with fake:
        loaded = load.load_engine(tiny.source, plan, None, fake.device)
        assert loaded.kernels(plan).executor == "graphs"
        assert loaded.model.seams.graphs is not None
        loaded.model.seams.graphs.lack = "they cannot be recorded here"
        assert loaded.kernels(plan).executor == "seams"
        loaded.close()
