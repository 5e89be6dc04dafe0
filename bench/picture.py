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
import re
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.peers.contenders import PROMPTS
from bench.peers.record import about, all_table, best_table, head_line, line, phase

BEGIN = "<!-- python -m bench.picture writes this table -->"
END = "<!-- end of the table -->"
BEGIN_ALL = "<!-- python -m bench.picture writes these tables -->"
END_ALL = "<!-- end of the tables -->"
ENGINES = {"moedge": "#0b6e8f", "llama.cpp": "#b0413e", "accelerate": "#d08a1d", "transformers": "#7a6aa8"}
Record = dict[str, Any]
SHOWN = ("four bits in 1.5 GiB", "bf16 in 3 GiB", "in memory, Zen 4")
SHOWN_SEQUENCES = ("1", "8", "32", "128")
# What models of bench.make_model are; README's text says it of the table.
FIRST_LINE = "A mixture of 7 GB in bf16 whose weights are random, in a real shape, on two CPU cores"


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


@contextmanager
def pyplot() -> Iterator[Any]:
    """matplotlib.pyplot for SVG files whose text is text, and whose bytes depend on the figures alone."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "moedge", "font.family": "sans-serif"}):
        yield plt
    plt.close("all")


def draw(records: list[Record], out: Path) -> None:
    """An SVG on white, so that it is read on light and on dark pages."""
    with pyplot() as plt:
        figure, panels = plt.subplots(
            1, len(records), figsize=(max(4.6 * len(records), 6.4), 3.4), squeeze=False, sharey=True
        )
        for panel, record in zip(panels[0], records, strict=True):
            draw_panel(panel, record)
        panels[0][0].set_ylabel("generated tokens/s")
        figure.suptitle(FIRST_LINE, fontsize=9)
        figure.text(0.01, 0.01, footnote(records), fontsize=7, color="#666")
        figure.tight_layout(rect=(0, 0.04, 1, 1))
        figure.savefig(out, format="svg", facecolor="white", metadata={"Date": None})


def draw_panel(panel: Any, record: Record) -> None:
    """Both axes are logarithmic: engines differ by factors."""
    for engine, speeds in best(record).items():
        color, above = ENGINES[engine], engine == "moedge"
        panel.plot(list(speeds), list(speeds.values()), color=color, marker="o", label=engine)
        # Of a third engine the labels would lie over those of the second; the table has its figures.
        for at in speeds.items() if engine != "transformers" else ():
            panel.annotate(
                speed(at[1]), at, textcoords="offset points", xytext=(0, 6 if above else -13), ha="center",
                fontsize=8, color=color,
            )  # fmt: skip
    panel.set(xscale="log", yscale="log", xlabel="sequences", title=record["title"])
    counts = sorted({one for speeds in best(record).values() for one in speeds})
    panel.set_xticks(counts, [str(one) for one in counts])
    panel.yaxis.set_major_formatter("{x:g}")
    panel.minorticks_off()
    panel.margins(x=0.12, y=0.18)
    panel.grid(visible=True, color="#e4e4e4")
    panel.legend(frameon=False, loc="lower right")


def footnote(records: list[Record]) -> str:
    return "; ".join(sorted(set(map(machine, records))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--performance", type=Path, help="the page of all settings and roofs")
    options = parser.parse_args()
    records = [json.loads(file.read_text()) for file in options.records]
    draw(shown(records)[:1], options.out)
    if options.readme:
        options.readme.write_text(with_table(options.readme.read_text(), records))
    if options.performance:
        options.performance.write_text(with_tables(options.performance.read_text(), records))
    print(table(records))


if __name__ == "__main__":
    main()
