"""Draws README's picture and writes its table, from what `bench.compare --record` measured.

    python -m bench.picture docs/measurements/*.json --out docs/under-a-ceiling.svg --readme README.md \
        --performance docs/dev/performance.md

Generated tokens per second by sequences, of the best setting of each engine. README shows the records of `SHOWN`, its
picture the first of them; the table goes between the two comments that name this script. docs/dev/performance.md gets,
between its own, the ratios, roofs and figures of all records and settings.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Container
from html import escape
from pathlib import Path
from typing import Any

from bench.peers.contenders import PROMPTS
from bench.peers.record import about, all_table, best_table, head_line, line, phase

BEGIN = "<!-- python -m bench.picture writes this table -->"
END = "<!-- end of the table -->"
BEGIN_ALL = "<!-- python -m bench.picture writes these tables -->"
END_ALL = "<!-- end of the tables -->"
ENGINES = ("moedge", "llama.cpp", "accelerate", "transformers")
Record = dict[str, Any]
SHOWN = ("four bits in 1.5 GiB", "bf16 in 3 GiB", "in memory, Zen 4")
SHOWN_SEQUENCES = ("1", "8", "32", "128")
# What models of bench.make_model are; README's text says it of the table.
MODEL = "a mixture of 7 GB in bf16, random weights in a real shape, two CPU cores"


def best(record: Record) -> dict[str, dict[int, float]]:
    """Generated tokens/s by sequences of each engine's best setting; what a ceiling killed has no entry."""
    return {
        engine: {int(cell): one for cell, one in cells.items() if cell != PROMPTS}
        for engine, cells in best_cells(record).items()
    }


def best_cells(record: Record) -> dict[str, dict[str, float]]:
    """Tokens/s of each engine's best setting, by cell; moedge's settings count that the record counts."""
    counted = record.get("counted")
    found: dict[str, dict[str, float]] = {}
    for one in record["contenders"]:
        engine, _, setting = one["title"].partition(" ")
        if engine == "moedge" and counted is not None and setting not in counted:
            continue
        for cell, speeds in one["tokens_per_second"].items():
            fastest = found.setdefault(engine, {})
            fastest[cell] = max(speeds[phase(cell)], fastest.get(cell, 0.0))
    return {engine: dict(sorted(found[engine].items(), key=column)) for engine in ENGINES if engine in found}


def column(cell: tuple[str, float]) -> float:
    """Numbers of sequences first."""
    return float("inf") if cell[0] == PROMPTS else int(cell[0])


def shown(records: list[Record]) -> list[Record]:
    """The records that README shows, in its order; all where none of them is given."""
    chosen = [record for record in records if record["title"] in SHOWN]
    return sorted(chosen, key=lambda record: SHOWN.index(record["title"])) or records


def table(records: list[Record], columns: Container[str] | None = None) -> str:
    """Markdown: a row for each record and engine, a column for each number of sequences, and for prompts."""
    speeds = [
        (f"{record['title']}, {engine}", found) for record in records for engine, found in best_cells(record).items()
    ]
    cells = sorted(
        {(cell, 0.0) for _, found in speeds for cell in found if columns is None or cell in columns}, key=column
    )
    names = [f"{PROMPTS}, tokens/s" if cell == PROMPTS else cell for cell, _ in cells]
    lines = [head_line(["generated tokens/s, by sequences", *names])]
    lines += [
        line([name, *(speed(found[cell]) if cell in found else "-" for cell, _ in cells)]) for name, found in speeds
    ]
    return "\n".join(lines)


def tables(records: list[Record]) -> str:
    """Markdown: of each record with single measurements its machine, ratios and roofs, and all settings."""
    return "\n\n".join(
        f"### {record['title'][0].upper()}{record['title'][1:]}\n\n{about(record)}.\n\n"
        f"{best_table(record)}\n\n{all_table(record)}"
        for record in records
        if "measurements" in record
    )


def speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.1f}"


def with_table(page: str, records: list[Record]) -> str:
    """Raises SystemExit where the page lacks the two comments."""
    chosen = shown(records)
    return between(page, BEGIN, END, f"{table(chosen, SHOWN_SEQUENCES)}\n\n{machines(chosen)}")


def with_tables(page: str, records: list[Record]) -> str:
    """Raises SystemExit where the page lacks the two comments."""
    return between(page, BEGIN_ALL, END_ALL, tables(records))


def machines(records: list[Record]) -> str:
    """What the records were measured on and when; records that say the same share a sentence."""
    texts = dict.fromkeys(machine(record) for record in records)
    return " ".join(f"{', '.join(one['title'] for one in records if machine(one) == text)}: {text}." for text in texts)


def machine(record: Record) -> str:
    if "machine" not in record:
        busy = max((one.get("cpu_share_of_others") or 0.0 for one in record["contenders"]), default=0.0)
        text = f"{record['processor']}, {record['cores']} cores, {record['date']}"
        return f"{text}, others' CPU {busy:.0%}" if busy else text
    own, days = record["machine"], sorted({one["at"][:10] for one in record["measurements"]})
    return f"{own['processor']}, {own['cores']} cores, {' to '.join(dict.fromkeys([days[0], days[-1]]))}"


def between(page: str, begin: str, end: str, text: str) -> str:
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"the page has no lines {begin!r} and {end!r}")
    return pattern.sub(lambda _: f"{begin}\n{text}\n{end}", page)


# In pixels: as wide as the text of README where repositories are read.
WIDTH, HEIGHT = 830, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 66, 58
STYLE = """text { font: 13px system-ui, sans-serif; fill: #1f2328; } .small { font-size: 11px; fill: #59636e; }
.title { font-size: 14px; font-weight: 600; } .grid { stroke: #d1d9e0; } .moedge { fill: #0b6e8f; }
.llama { fill: #b0413e; } .transformers { fill: #7a6aa8; } .back { fill: #ffffff; }
@media (prefers-color-scheme: dark) { text { fill: #f0f6fc; } .small { fill: #9198a1; } .grid { stroke: #3d444d; }
.moedge { fill: #4cb4d8; } .llama { fill: #e5827e; } .transformers { fill: #b3a4e0; } .back { fill: #0d1117; } }"""


def draw(record: Record, out: Path) -> None:
    """An SVG of bars on a linear axis, a group for each number of sequences; it follows a page's light or dark."""
    speeds = best(record)
    counts = sorted({one for found in speeds.values() for one in found})
    step = tick_step(max(speed for found in speeds.values() for speed in found.values()))
    most = step * math.ceil(max(speed for found in speeds.values() for speed in found.values()) / step)

    def y_of(tokens_per_second: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * tokens_per_second / most

    title = f"{record['title'][0].upper()}{record['title'][1:]}: {MODEL}"
    parts = [text(16, 24, title, "title", "start")]
    for number in range(round(most / step) + 1):
        y = y_of(number * step)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(LEFT - 8, y + 4, f"{number * step:g}", "small", "end"))
    group = (WIDTH - LEFT - RIGHT) / len(counts)
    width = 0.7 * group / len(speeds)
    for place, count in enumerate(counts):
        middle = LEFT + group * (place + 0.5)
        parts.append(text(middle, HEIGHT - BOTTOM + 18, str(count), "", "middle"))
        for number, (engine, found) in enumerate(speeds.items()):
            if count in found:
                x, y = middle + width * (number - len(speeds) / 2), y_of(found[count])
                name, tall = engine.split(".")[0], HEIGHT - BOTTOM - y
                parts.append(
                    f'<rect class="{name}" x="{x + 2:.1f}" y="{y:.1f}" width="{width - 4:.1f}" height="{tall:.1f}"/>'
                )
                parts.append(text(x + width / 2, y - 5, speed(found[count]), "", "middle"))
    for number, engine in enumerate(speeds):
        x = 16 + 110 * number
        parts.append(f'<rect class="{engine.split(".")[0]}" x="{x}" y="36" width="12" height="12"/>')
        parts.append(text(x + 18, 47, engine, "", "start"))
    parts.append(text(16 + 110 * len(speeds), 47, "generated tokens/s, by sequences of a pass", "small", "start"))
    parts.append(text(16, HEIGHT - 12, machine(record), "small", "start"))
    body = "\n".join(parts)
    out.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}">\n'
        f'<style>{STYLE}</style>\n<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>\n{body}\n</svg>\n'
    )


def tick_step(most: float) -> float:
    """1, 2 or 5 times a power of ten, of which `most` has four to nine."""
    power = 10.0 ** math.floor(math.log10(most / 4))
    return power * max(factor for factor in (1, 2, 5) if power * factor <= most / 4)


def text(x: float, y: float, shown: str, name: str, anchor: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(shown)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--performance", type=Path, help="the page of all settings and roofs")
    options = parser.parse_args()
    records = [json.loads(file.read_text()) for file in options.records]
    draw(shown(records)[0], options.out)
    if options.readme:
        options.readme.write_text(with_table(options.readme.read_text(), records))
    if options.performance:
        options.performance.write_text(with_tables(options.performance.read_text(), records))
    print(table(records))


if __name__ == "__main__":
    main()
