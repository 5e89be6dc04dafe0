"""What bench/compare.py measured, as JSON: every single measurement, and from them medians, roofs and tables.

A record is one table: a machine, a model, a memory ceiling or none, and cells, which are numbers of sequences that
generate, and prompts. Each measurement has its time, the CPU share of other processes, and the rates at which the
machine read memory and computed bfloat16 products right before. It is written after each, so that a command that was
stopped continues.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from bench.peers.contenders import PROMPTS

Record = dict[str, Any]
Measurement = dict[str, Any]
# What is compared with moedge; bare products are a roof.
PEERS = ("llama.cpp", "vllm", "openvino", "transformers", "accelerate")
OURS = "moedge"


def engine_of(title: str) -> str:
    return title.split(maxsplit=1)[0]


def load(path: Path | None, head: Record) -> Record:
    """The record at `path`, or a new one with this head. Raises SystemExit where its cells or model are others."""
    if path is None or not path.exists():
        return {**head, "bits": {}, "measurements": []}
    record: Record = json.loads(path.read_text())
    for name in ("model", "ceiling", "cells"):
        if record.get(name) != head[name]:
            raise SystemExit(f"{path} has {name} {record.get(name)}, and {head[name]} was asked for; name another file")
    return record | {"command": head["command"], "machine": head["machine"], "counted": head["counted"]}


def save(record: Record, path: Path | None) -> None:
    """All of it or nothing: who is killed leaves the file as it was."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    date = max((one["at"][:10] for one in record["measurements"]), default=None)
    beside.write_text(json.dumps(record | {"date": date, "contenders": summary(record)}, indent=1) + "\n")
    os.replace(beside, path)


def forget(record: Record, engines: Iterable[str]) -> None:
    gone = set(engines)
    record["measurements"] = [one for one in record["measurements"] if engine_of(one["title"]) not in gone]


def found(record: Record, title: str, cell: str) -> list[Measurement]:
    return [one for one in record["measurements"] if one["title"] == title and one["cell"] == cell]


def phase(cell: str) -> str:
    return "prompt" if cell == PROMPTS else "generated"


def figure(record: Record, title: str, cell: str) -> float | None:
    """Median tokens per second; None where nothing was measured, or the kernel killed."""
    speeds = [one[phase(cell)] for one in found(record, title, cell) if one["verdict"] == "ok"]
    return statistics.median(speeds) if speeds else None


def titles(record: Record, *engines: str) -> list[str]:
    """In the order of their first measurement."""
    return list(dict.fromkeys(one["title"] for one in record["measurements"] if engine_of(one["title"]) in engines))


class Best(NamedTuple):
    title: str
    tok_s: float


def best(record: Record, cell: str, names: Iterable[str]) -> Best | None:
    """The fastest of `names` in a cell."""
    speeds = [Best(name, speed) for name in names if (speed := figure(record, name, cell)) is not None]
    return max(speeds, key=lambda one: one.tok_s, default=None)


def counted(record: Record) -> list[str]:
    """moedge's settings that lose at most what llama.cpp's Q4_0 loses; all, where the head names none."""
    names = record.get("counted")
    return [one for one in titles(record, OURS) if names is None or one.removeprefix(f"{OURS} ") in names]


# --- roofs


class Roof(NamedTuple):
    """Tokens per second if nothing but reading weights and KV cache took time, and if nothing but products did."""

    of_bytes: float
    of_products: float

    @property
    def smaller(self) -> float:
        return min(self)


def roof(record: Record, title: str, cell: str) -> Roof | None:
    """None where the rates, or the share of experts that passes of this cell want, were not measured."""
    bits = record["bits"].get(title)
    read, compute = (_median(found(record, title, cell), name) for name in ("read_bytes_s", "flop_s"))
    share = _median([one for one in record["measurements"] if one["cell"] == cell], "experts")
    if not (bits and read and compute and share):
        return None
    model, (sequences, prompt, _) = record["model"], record["cells"][cell]
    of_prompts = cell == PROMPTS
    tokens = sequences * prompt if of_prompts else sequences
    elements = model["dense_numel"] + share * model["experts_numel"] + model["head_numel"]
    nbytes = elements * bits / 8 + sequences * prompt * model["kv_token_nbytes"] * (not of_prompts)
    # Of a prompt's tokens, the last one alone meets the output head.
    operations = 2 * (model["active_numel"] - model["head_numel"] * of_prompts)
    return Roof(tokens / (nbytes / read), compute / operations)


def _median(measurements: Iterable[Measurement], name: str) -> float | None:
    values = [one[name] for one in measurements if one.get(name)]
    return statistics.median(values) if values else None


# --- tables


def summary(record: Record) -> list[dict[str, Any]]:
    """A contender a line: medians by cell, and the roofs beside them."""
    return [
        {
            "title": title,
            "tokens_per_second": {
                cell: {phase(cell): round(speed, 3)} | _roof_fields(roof(record, title, cell))
                for cell in record["cells"]
                if (speed := figure(record, title, cell)) is not None
            },
        }
        for title in titles(record, OURS, *PEERS, "products")
    ]


def _roof_fields(one: Roof | None) -> dict[str, float]:
    return {"roof_of_bytes": round(one.of_bytes, 1), "roof_of_products": round(one.of_products, 1)} if one else {}


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def head_line(cells: list[str]) -> str:
    return f"{line(cells)}\n{'|---' * len(cells)}|"


def speed(tok_s: float) -> str:
    """Whoever reads all weights for every token makes hundredths of one a second."""
    return f"{tok_s:.0f}" if tok_s >= 100 else f"{tok_s:.1f}" if tok_s >= 1 else f"{tok_s:.3f}"


def cell_name(record: Record, cell: str) -> str:
    sequences, prompt, _ = record["cells"][cell]
    return f"prompts, {sequences} x {prompt}" if cell == PROMPTS else cell


def about(record: Record) -> str:
    """The machine, when it was measured, and what disturbed it: one line."""
    machine, times = record["machine"], [one["at"] for one in record["measurements"]]
    others = [one["cpu_share_of_others"] for one in record["measurements"]]
    counts = [len(found(record, *key)) for key in {(one["title"], one["cell"]) for one in record["measurements"]}]
    return (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB; "
        f"{_times(times)}; others' CPU at most {max(others, default=0):.0%}; "
        f"medians of {_span(counts, str)}; memory read at {_rates(record['measurements'])} GB/s"
    )


def _rates(measurements: Iterable[Measurement]) -> str:
    return _span([one["read_bytes_s"] / 1e9 for one in measurements if one.get("read_bytes_s")], "{:.0f}".format)


def _span(values: list[Any], shown: Callable[[Any], str]) -> str:
    ends = list(dict.fromkeys([shown(min(values)), shown(max(values))])) if values else ["-"]
    return " to ".join(ends)


def _times(times: list[str]) -> str:
    """From the first minute to the last, UTC."""
    if not times:
        return "-"
    first, last = (one.replace("T", " ")[:16] for one in (min(times), max(times)))
    return f"{first} to {last[11:] if first[:10] == last[:10] else last} UTC"


def best_table(record: Record) -> str:
    """A row a cell: moedge's best, the peers' best, their ratio, and moedge's roofs. `*`: fewer than three repeats."""
    lines = [
        head_line(
            ["sequences", "moedge", "best peer", "ratio", "roof of bytes", "roof of products", "of the smaller roof"]
        )
    ]
    for cell in record["cells"]:
        ours, peer = best(record, cell, counted(record)), best(record, cell, titles(record, *PEERS))
        above = roof(record, ours.title, cell) if ours else None
        lines.append(
            line(
                [
                    cell_name(record, cell),
                    *(_with_setting(record, one, cell) for one in (ours, peer)),
                    f"{ours.tok_s / peer.tok_s:.2f}" if ours and peer else "-",
                    *(map(speed, above) if above else ("-", "-")),
                    f"{ours.tok_s / above.smaller:.0%}" if ours and above else "-",
                ]
            )
        )
    return "\n".join(lines)


def _with_setting(record: Record, one: Best | None, cell: str) -> str:
    if one is None:
        return "-"
    return f"{speed(one.tok_s)}{_mark(record, one.title, cell)} ({one.title.removeprefix(f'{OURS} ')})"


def _mark(record: Record, title: str, cell: str) -> str:
    return "" if len(found(record, title, cell)) >= 3 else "*"


def all_table(record: Record) -> str:
    """A row a setting: medians, their share of the setting's own smaller roof, and what they were measured beside."""
    cells = list(record["cells"])
    lines = [head_line(["tok/s (share of the roof)", *(cell_name(record, one) for one in cells), *_ABOUT_COLUMNS])]
    for title in titles(record, OURS, *PEERS, "products"):
        own = [one for one in record["measurements"] if one["title"] == title]
        others = max(one["cpu_share_of_others"] for one in own)
        tail = [_rates(own), f"{others:.0%}", _times([one["at"] for one in own])]
        lines.append(line([title, *(_shown(record, title, cell) for cell in cells), *tail]))
    return "\n".join(lines)


_ABOUT_COLUMNS = ("memory GB/s", "others' CPU", "measured")


def _shown(record: Record, title: str, cell: str) -> str:
    tok_s, above = figure(record, title, cell), roof(record, title, cell)
    if tok_s is None:
        killed = any(one["verdict"].startswith("killed") for one in found(record, title, cell))
        return "killed" if killed else "-"
    share = f" ({tok_s / above.smaller:.0%})" if above else ""
    return f"{speed(tok_s)}{_mark(record, title, cell)}{share}"
