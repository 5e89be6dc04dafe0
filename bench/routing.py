"""What policies of held experts and forecasts are worth on real routing, in counts of reads: nothing is timed.

    python -m bench.make_real_mixture --out models/cut
    python -m bench.routing --model models/cut

Real prose and source code are routed token by token; a pass is one token of each of some texts, as when all of them
generate. Then held experts and forecasts are replayed over what the layers wanted. The mixture is a dense model that
was cut up (bench/make_real_mixture.py): a token takes many of its experts. As published mixtures take fewer, every
table is repeated with the first `--first` of each token's experts, which is what its routers would choose then.

`bytes`: MB of experts read a token, by what is held: the first experts of each layer for good (fixed), the last used
(lru), the most often wanted (popular: moe/expert_cache.py), and the least of any policy (Belady's). `all` reads every
expert that is not held, `auto` what moe/streaming_order.py chooses with popular experts held.
`forecasts`: the share of right guesses of each predictor, and what they save of the reads that layers wait for. A layer
waits for its missing experts and for the reads that would have fitted before its router has chosen (`--idle`).
"""

from __future__ import annotations

import argparse
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.make_real_mixture import code, prose
from moedge.moe.expert_cache import Popular
from moedge.moe.routing_stats import RoutingStats
from moedge.moe.streaming_mode import Mode, Waits, choose_mode, num_guesses
from moedge.offload.stream.stream import ShardKey
from support.experts.replay import HoldPolicy, belady, replay

# Tokens of a text: those before the first pass, and the passes.
BEFORE, PASSES = 32, 64
MOST_PASSES = 128
Ids = npt.NDArray[np.int64]


# --- Recording


@dataclass(frozen=True, slots=True)
class Turn:
    """A layer of a pass: the experts of each token `ids` [T, A], best first, and `ahead` [T, A], what this layer's
    router chooses with the states of the layer before; None in the first layer."""

    layer: int
    ids: Ids
    ahead: Ids | None

    @property
    def wanted(self) -> list[int]:
        found: list[int] = np.unique(self.ids).tolist()
        return found


def record(model: Any, texts: torch.Tensor, before: int = BEFORE) -> npt.NDArray[np.int64]:
    """Routes every token of `texts` [n, m] by a Mixtral: [2, L, n, m - before, A], `ids` and `ahead`."""
    routers = [module for module in model.modules() if type(module).__name__ == "MixtralTopKRouter"]
    states: dict[Any, torch.Tensor] = {}
    hooks = [each.register_forward_pre_hook(lambda one, args: states.update({one: args[0]})) for each in routers]
    found = []
    with torch.inference_mode():
        for text in texts.split(8):
            model.model(text)
            rows = [states[router] for router in routers]
            both = [[router.forward(each)[2] for router, each in zip(routers, given, strict=True)]
                    for given in (rows, [rows[0], *rows[:-1]])]  # fmt: skip
            shape = (2, len(routers), *text.shape, -1)
            found.append(torch.stack([torch.stack(each) for each in both]).view(shape)[:, :, :, before:])
    for hook in hooks:
        hook.remove()
    return torch.cat(found, 2).numpy()


def turns(routed: npt.NDArray[np.int64], size: int, first: int) -> list[Turn]:
    """Layer after layer of passes of `size` texts each; of a token's experts the `first` ones."""
    _, layers, texts, passes, _ = routed.shape
    found = []
    for number in range(min(texts // size * passes, MOST_PASSES)):
        group, token = divmod(number, passes)
        ids, ahead = routed[:, :, group * size : (group + 1) * size, token, :first]
        found += [Turn(layer, ids[layer], ahead[layer] if layer else None) for layer in range(layers)]
    return found


def cut_texts(tokenizer: Any, text: str, count: int) -> torch.Tensor:
    length = BEFORE + PASSES
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
    if len(ids) < count * length:
        raise SystemExit(f"{len(ids)} tokens are fewer than {count} texts of {length}: ask for fewer --sequences")
    return ids[: count * length].view(count, length)


# --- Held experts


class Lru:
    """Evicts the expert that was used longest ago for every expert that arrives, as most caches do."""

    def __init__(self, held: Iterable[ShardKey]) -> None:
        self._order: OrderedDict[ShardKey, None] = OrderedDict.fromkeys(held)

    def begin_pass(self) -> None:
        pass

    def observe(self, layer: int, wanted: Sequence[int]) -> None:
        for key in (ShardKey(layer, expert) for expert in wanted):
            if key in self._order:
                self._order.move_to_end(key)

    def victim(self, entering: ShardKey, may_leave: Callable[[ShardKey], bool]) -> ShardKey:
        oldest, _ = self._order.popitem(last=False)
        self._order[entering] = None
        return oldest


class Fixed:
    """Keeps what it holds."""

    def begin_pass(self) -> None:
        pass

    def observe(self, layer: int, wanted: Sequence[int]) -> None:
        pass

    def victim(self, entering: ShardKey, may_leave: Callable[[ShardKey], bool]) -> None:
        return None


def popular(held: Iterable[ShardKey], layers: int, experts: int) -> Popular:
    even = {layer: np.full(experts, 0.5) for layer in range(layers)}
    return Popular(held, dict.fromkeys(range(layers), 1), even)


def auto(trace: list[Turn], layers: int, experts: int, held: list[ShardKey], idle: float) -> tuple[int, Counter[Mode]]:
    """The reads of the modes that moedge chooses without forecasts, popular experts held; and layers by mode."""
    stats, slots = RoutingStats(dict.fromkeys(range(layers), experts)), set(held)
    policy, reads, used = popular(held, layers, experts), 0, Counter[Mode]()
    for turn in trace:
        if turn.layer == 0:
            policy.begin_pass()
        wanted, tokens = turn.wanted, len(turn.ids)
        mine = {key.expert for key in slots if key.layer == turn.layer}
        mode = choose_mode(stats, turn.layer, tokens, mine, Waits(idle, idle), 0.0)
        used[mode] += 1
        missing = [ShardKey(turn.layer, expert) for expert in wanted if expert not in mine]
        reads += experts - len(mine) if mode is Mode.ALL else len(missing)
        stats.observe_union(turn.layer, tokens, len(wanted))
        stats.count(turn.layer, tokens, np.bincount(turn.ids.flat, minlength=experts).tolist())
        policy.observe(turn.layer, wanted)
        for key in missing:
            if (leaving := policy.victim(key, lambda _: True)) is not None:
                slots.remove(leaving)
                slots.add(key)
    return reads, used


def print_bytes(
    name: str, trace: list[Turn], layers: int, experts: int, share: float, nbytes: int, idle: float
) -> None:
    """A row: megabytes a token under each policy, of `nbytes` an expert, a `share` of every layer's experts held."""
    count = int(share * experts)
    held = [ShardKey(layer, expert) for layer in range(layers) for expert in range(count)]
    wanted = [turn.wanted for turn in trace]
    tokens, total = sum(len(turn.ids) for turn in trace) / layers, sum(map(len, wanted))
    policies: dict[str, HoldPolicy] = {"fixed": Fixed(), "lru": Lru(held), "popular": popular(held, layers, experts)}
    reads = {way: total - replay(wanted, layers, policy, held) for way, policy in policies.items()}
    chosen, used = auto(trace, layers, experts, held, idle)
    reads |= {
        "Belady": total - belady(wanted, layers, held),
        "auto": chosen,
        "all": len(trace) * (experts - count),
    }
    cells = " | ".join(f"{number * nbytes / tokens / 1e6:.3f}" for number in reads.values())
    print(f"| {name} | {total / len(trace) / experts:.0%} | {cells} | {used[Mode.ALL] / len(trace):.0%} |", flush=True)


# --- Forecasts


class Predictors:
    """How likely each expert of a turn is wanted [E], by what is known before its router has chosen."""

    def __init__(self, layers: int, experts: int) -> None:
        self._popular = np.zeros((layers, experts))
        self._follows = np.zeros((layers, experts, experts))
        self._experts = experts

    def expected(self, turn: Turn, before: Turn | None) -> dict[str, npt.NDArray[np.float64]]:
        found = {"popularity": self._popular[turn.layer]}
        if turn.ahead is not None and before is not None:
            table = self._follows[turn.layer]
            times = np.maximum(table.sum(1, keepdims=True), 1.0)
            found["affinity"] = np.bincount(before.ids.flat, minlength=self._experts) @ (table / times)
            # A token's first choices are surer than its last.
            sureness = np.broadcast_to(np.linspace(1.0, 0.5, turn.ahead.shape[1]), turn.ahead.shape)
            found["look-ahead"] = np.bincount(turn.ahead.flat, sureness.flat, self._experts)
        return found

    def observe(self, turn: Turn, before: Turn | None) -> None:
        np.add.at(self._popular[turn.layer], turn.ids.flat, 1.0)
        if turn.layer and before is not None:
            for then, now in zip(before.ids, turn.ids, strict=True):
                self._follows[turn.layer][np.ix_(then, now)] += 1.0


def print_forecasts(name: str, trace: list[Turn], layers: int, experts: int, share: float, idle: float) -> None:
    """A row: the precision of each predictor, and the share of what layers wait for that its guesses save.

    Popular experts are held. The first quarter of the passes only teaches the predictors; first layers are left out.
    """
    predictors, most = Predictors(layers, experts), num_guesses(idle)
    held = [ShardKey(layer, expert) for layer in range(layers) for expert in range(int(share * experts))]
    slots, policy = set(held), popular(held, layers, experts)
    guessed, right, saved = Counter[str](), Counter[str](), defaultdict[str, float](float)
    missed, visits, before = 0, 0, None
    for number, turn in enumerate(trace):
        if turn.layer == 0:
            policy.begin_pass()
        missing = [expert for expert in turn.wanted if ShardKey(turn.layer, expert) not in slots]
        counted = turn.layer > 0 and number >= len(trace) // 4
        if counted:
            missed, visits = missed + len(missing), visits + 1
        for way, expected in predictors.expected(turn, before).items():
            free = [each for each in np.argsort(-expected, kind="stable") if ShardKey(turn.layer, each) not in slots]
            guesses = [each for each in free[:most] if expected[each] > 0]
            if counted:
                hits = len(set(guesses) & set(missing))
                wrong = len(guesses) - hits
                guessed[way], right[way] = guessed[way] + len(guesses), right[way] + hits
                saved[way] += min(hits, idle) - max(0.0, wrong - max(0.0, idle - hits))
        predictors.observe(turn, before)
        policy.observe(turn.layer, turn.wanted)
        for key in (ShardKey(turn.layer, expert) for expert in missing):
            if (leaving := policy.victim(key, lambda _: True)) is not None:
                slots.remove(leaving)
                slots.add(key)
        before = turn
    waits = missed + idle * visits
    cells = " | ".join(
        f"{right[way] / max(guessed[way], 1):.0%} | {saved[way] / waits:+.1%}"
        for way in ("look-ahead", "affinity", "popularity")
    )
    print(f"| {name} | {missed / visits:.1f} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--first", type=int, default=4, help="experts of a token in the second half of each table")
    parser.add_argument("--held", type=float, default=0.5, help="the share of the experts that is held")
    parser.add_argument("--idle", type=float, default=2.0, help="reads that fit in before a router has chosen")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    most = max(options.sequences)
    of_prose, of_code = (record(model, cut_texts(tokenizer, text, most)) for _, text in (prose(), code()))
    mixed = np.stack([of_prose, of_code], 3).reshape(*of_prose.shape[:2], -1, *of_prose.shape[3:])
    config = model.config
    layers, experts, per_token = config.num_hidden_layers, config.num_local_experts, config.num_experts_per_tok
    nbytes = 3 * config.hidden_size * config.intermediate_size * 2
    rows = [
        (f"{kind} | {size} | {first} of {experts}", turns(routed, size, first))
        for first in (per_token, options.first)
        for kind, routed in (("prose", of_prose), ("code", of_code), ("mixed", mixed))
        for size in options.sequences
    ]
    print(f"{options.held:.0%} of the experts held; MB a token of bf16 experts\n")
    print("| text | sequences | a token | wanted | fixed | lru | popular | Belady | auto | all | layers by `all` |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, trace in rows:
        print_bytes(name, trace, layers, experts, options.held, nbytes, options.idle)
    print(f"\n{num_guesses(options.idle)} guesses, {options.idle:g} reads fit in before a router has chosen\n")
    print("| text | sequences | a token | missing | look-ahead right | saves | affinity right | saves | "
          "popularity right | saves |\n|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for name, trace in rows:
        print_forecasts(name, trace, layers, experts, options.held, options.idle)


if __name__ == "__main__":
    main()
