"""What a pass costs the host of a device: how often it waits, and how many copies and kernels it starts.

Works above and below a fake device (fake_device.py). Above it every call of torch shows which side its tensors are on,
so that a transfer is seen as one; below it the same call shows the aten operations that it consists of. Each of these
that computes is one launch, whatever number of kernels CUDA makes of it; a Triton kernel is one, too, and is not run.
"""

import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moedge.moe.streaming_mode import RouterLatency, Waits
from moedge.offload.stream.stream import ShardStream
from moedge.quant.formats import lookup, nf4
from moedge.quant.kernels.product import Launch
from moedge.runtime.attention.triton_backend import FreshAttention
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.model import weights_seam
from moedge.runtime.model.experts_seam import PackedExperts
from moedge.runtime.weights.key_offsets import KeyOffsets
from support.device.fake_graph import Graph

# Work that belongs to no layer: before the first, behind the last, sampling.
OUTSIDE = -1

# On a GPU the host learns something from the device's memory in these, and waits for it: so many times.
ASKING = {
    "_local_scalar_dense": 1, "bincount": 2, "nonzero": 1, "nonzero_numpy": 1, "_unique": 1, "_unique2": 1,
    "unique_dim": 1, "unique_consecutive": 1, "masked_select": 1, "equal": 1, "histc": 2,
}  # fmt: skip
# Of these a boolean mask asks how many it selects.
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# No kernel: memory and metadata.
FREE = {
    "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh", "detach",
    "detach_", "resize_", "set_", "alias", "_local_scalar_dense", "resolve_conj", "resolve_neg",
}  # fmt: skip
# Make tensors of numbers that the host has.
FACTORIES = {"tensor", "as_tensor", "asarray", "new_tensor"}


class Cost(NamedTuple):
    """Times that the host waits for the device; copies between them that it does not wait for; kernels."""

    waits: int = 0
    copies: int = 0
    launches: int = 0

    def __add__(self, other: Any) -> "Cost":
        return Cost(*map(sum, zip(self, other, strict=True)))


class HostCost:
    """Counts what happens between `with costs.counting()`, by layer.

    `with HostCost(fake, fakes) as costs` is the fake device, entered.
    """

    def __init__(self, fake: Any, fakes: Any) -> None:
        self._fake, self._fakes = fake, fakes
        self._below = _Below(self)
        self._opened = ExitStack()
        self._pinned: set[int] = set()
        self._thread = 0
        self.pending: Any = None
        self.transferring = False
        self.counts: defaultdict[int, Cost] = defaultdict(Cost)
        # What was counted, by layer, kind and name: for whoever looks for a figure's cause.
        self.causes: Counter[tuple[int, str, str]] = Counter()
        self.layer = OUTSIDE

    def __enter__(self) -> "HostCost":
        self._opened.enter_context(self._below)
        self._opened.enter_context(self._fake)
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """One pass, or any other piece of work, in the calling thread."""
        self.counts.clear()
        self.causes.clear()
        self.layer, self._thread = OUTSIDE, threading.get_ident()
        with ExitStack() as patched:
            patched.enter_context(patch.object(Launch, "run", self._kernels()))
            simulator = self._fakes.simulator
            patched.enter_context(patch.object(Graph, "replay", self._counted(Graph.replay, self._replayed)))
            for each in (simulator.Event, simulator.Stream):
                patched.enter_context(patch.object(each, "synchronize", self._counted(each.synchronize, self._waited)))
            patched.enter_context(_Above(self))
            yield
        self._thread = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While inside, nothing is counted."""
        thread, self._thread = self._thread, 0
        try:
            yield
        finally:
            self._thread = thread

    @property
    def is_counting(self) -> bool:
        return self._thread == threading.get_ident()

    def add(self, kind: str, name: str, times: int = 1) -> None:
        """`kind` is a field of Cost."""
        if self.is_counting and times:
            self.counts[self.layer] += Cost(**{kind: times})
            self.causes[self.layer, kind, name] += times

    @property
    def whole(self) -> Cost:
        """All of it."""
        total = Cost()
        for cost in self.counts.values():
            total += cost
        return total

    @property
    def per_layer(self) -> Cost:
        """The most of any layer behind the first, which also makes what all of them use."""
        layers = [cost for layer, cost in self.counts.items() if layer > 0]
        return Cost(*map(max, zip(*layers, strict=True)))

    def watch(self, decoder: Any) -> None:
        """Counts are told apart by the layers of this decoder from here on."""
        layers, arrivals = decoder.layers, decoder.layers._arrivals

        def watched() -> Iterator[int]:
            arriving = arrivals()
            for self.layer in range(len(layers)):
                yield next(arriving)
            self.layer = OUTSIDE
            yield from arriving

        layers._arrivals = watched

    def pin(self, tensor: torch.Tensor) -> None:
        """Its memory is page-locked as long as it lives."""
        storage = tensor.untyped_storage()
        self._pinned.add(address := storage.data_ptr())
        weakref.finalize(storage, self._pinned.discard, address)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        begin = tensor.data_ptr()
        if tensor.untyped_storage().data_ptr() in self._pinned:
            return True
        return bool(self._fake.cuda.is_pinned(begin, begin + tensor.numel() * tensor.element_size()))

    def _kernels(self) -> Callable[[Launch], None]:
        """In place of kernels, whose interpreter would take most of the time: zeros where memory was never written."""

        def launched(launch: Launch) -> None:
            self.add("launches", launch.kernel.fn.__name__)
            with self.paused():
                for leaf in tree_leaves(launch.arguments):
                    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                        leaf.nan_to_num_()
                    elif isinstance(leaf, torch.Tensor) and leaf.dtype == torch.int64:
                        # Rows that a kernel would have written.
                        leaf.clamp_(min=0)

        return launched

    def _waited(self, point: Any) -> None:
        if not self.transferring:
            self.add("waits", f"{type(point).__name__}.synchronize")

    def _replayed(self, graph: Any) -> None:
        self.add("launches", "graph")

    def _counted(self, method: Callable[[Any], None], note: Callable[[Any], None]) -> Callable[[Any], None]:
        def counted(this: Any) -> None:
            note(this)
            with self.paused():
                method(this)

        return counted


class _Above(TorchFunctionMode):
    """Sees which side tensors are on: transfers are counted here, what computes is left to `_Below`."""

    def __init__(self, costs: HostCost) -> None:
        super().__init__()
        self._costs = costs

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "__get__" or not self._costs.is_counting:
            return func(*args, **kwargs)
        if name == "tolist" and _is_there(args[0]):
            self._costs.add("waits", name)
            return func(*args, **kwargs)
        self._costs.add("waits", name, _lists(name, args))
        crossing = name == "copy_" and _is_there(args[0]) != _is_there(args[1])
        self._costs.pending = func if self._computes(args, kwargs) and not crossing else None
        # How the fake device makes a transfer wait is its own affair.
        self._costs.transferring = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._costs.transferring = False
        self._costs.pending = None
        if name == "pin_memory" or kwargs.get("pin_memory"):
            self._costs.pin(result)
        elif crossed := self._crossed(name, args, result):
            self._costs.add(self._kind(name, *crossed, kwargs), name)
        return result

    def _computes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        asked = kwargs.get("device")
        there = asked is not None and torch.device(asked).type != "cpu"
        return there or any(map(_is_there, tree_leaves((args, kwargs))))

    def _crossed(self, name: str, args: tuple[Any, ...], result: Any) -> tuple[Any, Any] | None:
        """Source and target of a transfer; None where there was none. The source of a factory is no tensor."""
        if name in FACTORIES:
            new = _is_there(result) and not any(map(_is_there, args[name == "new_tensor" :]))
            return (None, result) if new else None
        ends = {"to": (args[0], result), "cpu": (args[0], result), "cuda": (args[0], result), "copy_": args[1::-1]}
        source, target = ends.get(name, (None, None)) if args else (None, None)
        crossed = isinstance(source, torch.Tensor) and _is_there(source) != _is_there(target)
        return (source, target) if crossed else None

    def _kind(self, name: str, source: Any, target: Any, kwargs: dict[str, Any]) -> str:
        """What is not page-locked is copied while the host waits. torch's own target of a copy to the host is."""
        host = target if _is_there(source) else source
        locked = host is not None and (self._costs.is_pinned(host) or (host is target and name != "copy_"))
        return "copies" if kwargs.get("non_blocking") and locked else "waits"


class _Below(TorchFunctionMode):
    """Lets the operations of the one call be counted that was announced; what the fake device does itself is not."""

    def __init__(self, costs: HostCost) -> None:
        super().__init__()
        self._costs = costs
        self._operations = _Operations(costs)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._costs.pending is None or func is not self._costs.pending:
            return func(*args, **(kwargs or {}))
        self._costs.pending = None
        with self._operations:
            return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Counts aten operations."""

    def __init__(self, costs: HostCost) -> None:
        super().__init__()
        self._costs = costs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            # In inference mode operations that consist of others arrive whole.
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = func._schema.name.removeprefix("aten::")
        masked = name in INDEXING and _has_mask(args[1])
        self._costs.add("waits", name, ASKING.get(name, int(masked or _counts_itself(name, args, kwargs))))
        if name not in FREE and not func.is_view:
            self._costs.add("launches", name)
        return func(*args, **kwargs)


def _is_there(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def _lists(name: str, args: tuple[Any, ...]) -> int:
    """How many indices of a tensor on the device are numbers that the host has: each is copied from pageable memory."""
    if name not in {"__getitem__", "__setitem__"} or not _is_there(args[0]):
        return 0
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return sum(isinstance(each, list) for each in index)


def _has_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype in {torch.bool, torch.uint8} for index in indices)


def _counts_itself(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Repeating by numbers on the device asks it for their sum, unless that is given."""
    return name == "repeat_interleave" and kwargs.get("output_size") is None and len(args) < 3


@contextmanager
def steady(costs: HostCost) -> Iterator[None]:
    """Leaves nothing to chance or to the processor: routing, the order of arrivals, measured gaps.

    Tokens choose experts in turn. Experts that stream arrive one by one, as they do where the link binds. torch's flash
    attention for ragged batches, which no processor has, is one launch, and so is its RMSNorm.
    """
    forward = PackedExperts.forward

    def routed(
        self: PackedExperts, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        with costs.paused():
            chosen = torch.arange(expert_ids.numel(), device=expert_ids.device) % self.source.num_experts
            expert_ids.copy_(chosen.view(expert_ids.shape))
        return forward(self, hidden, expert_ids, weights)

    def ragged(self: FreshAttention, call: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, fresh: Any) -> Any:
        costs.add("launches", "varlen_attn")
        with costs.paused():
            return FreshAttention(None).attend(call, q, k, v, fresh)

    def fused(x: torch.Tensor, *others: Any) -> torch.Tensor:
        costs.add("launches", "_fused_rms_norm")
        with costs.paused():
            return torch.nn.functional.rms_norm(x, *others)

    with (
        patch.object(weights_seam, "rms_norm", fused),
        patch.object(PackedExperts, "forward", routed),
        patch.object(FreshAttention, "_flash", ragged),
        patch.object(ShardStream, "is_ready", lambda self: False),
        patch.object(RouterLatency, "mean", lambda self, tokens, first=False: Waits(2.0, 2.0)),
    ):
        yield


def _without_products(run: Callable[[Launch], None]) -> Callable[[Launch], None]:
    """Products are zeros, which graphs record as well: the interpreter would take most of the time for them."""

    def launched(launch: Launch) -> None:
        if launch.kernel.fn.__name__ == "grouped_product":
            launch.arguments[2].zero_()
        else:
            run(launch)

    return launched


def passes(case: Any, costs: HostCost, plan: Any, device: Any, stream: Any) -> dict[str, dict[str, Cost]]:
    """What passes of a tiny model cost: the first, of prompts alone, and the one behind it, which decodes; where layers
    are replayed, only the latter, which follows the pass that records it.

    Of each the `layer` that costs most behind the first, and the whole `pass`. Keys have offsets of zero.
    """
    found: dict[str, dict[str, Cost]] = {}
    groups = case.source.shape.kv_groups
    offsets = KeyOffsets(
        {layer: torch.zeros(group.kv_heads, group.head_dim) for group in groups for layer in group.layers}
    )
    # Made once a process.
    lookup._pairs(nf4.VALUES, device.torch_device)
    with closing(load_engine(case.source, plan, None, device, stream, offsets)) as loaded:
        costs.watch(loaded.model.model.get_decoder())
        for index, ids in enumerate(case.prompts):
            loaded.engine.add(Sequence(ids, case.params(index, 0.0)))
        with steady(costs):
            with patch.object(Launch, "run", _without_products(Launch.run)):
                for _ in range(4 if plan.graphs_nbytes else 0):
                    loaded.engine.step()
            for kind in ("decode",) if plan.graphs_nbytes else ("prompts", "decode"):
                with costs.counting():
                    loaded.engine.step()
                found[kind] = {"layer": costs.per_layer, "pass": costs.whole}
    return found
