"""Do all kernels compile, and well, with every Triton that people have, for GPUs that are not there?

    make kernels                       everything; continues where it was interrupted
    make kernels ARGS=--quick          one launch of each kernel, oldest and newest pinned Triton, two GPUs
    make kernels ARGS=--update         records spills and warps of the kernels that are not hot
    make kernels ARGS=--table          prints the table of bench/results/gpu.md as well
    make kernels ARGS='--only int4'    kernels whose name has this text

Compares the table of Tritons with what torch's wheels pin, where a registry answers. Exits 1 where that differs, where
a kernel does not compile or breaks a rule (rules.py), or where one that is not hot spills more, or leaves an SM fewer
warps, than ratchet.json says. Tritons and results are kept in build/kernels; needs no GPU and no driver.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from matrix.compiling import tritons
from matrix.compiling.rules import LIMITS

HERE = Path(__file__).parent
RATCHET = HERE / "ratchet.json"
QUICK_ARCHS = (86, 90)
Report = dict[str, Any]
Ratchet = dict[str, dict[str, list[int]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--json", action="store_true", help="print a line for each kernel")
    parser.add_argument("--triton", nargs="+", metavar="VERSION")
    parser.add_argument("--arch", nargs="+", type=int, choices=list(LIMITS))
    parser.add_argument("--only", default="", metavar="TEXT", help="kernels whose name has this text")
    options = parser.parse_args()
    versions = options.triton or (tritons.oldest_and_newest_pinned() if options.quick else tritons.versions())
    archs = options.arch or (QUICK_ARCHS if options.quick else list(LIMITS))
    wrong = [] if options.quick else compare_table()
    begin = time.monotonic()
    reports = run_all(versions, archs, "quick" if options.quick else "all", options.only)
    if options.json:
        print("\n".join(map(json.dumps, reports)))
    if options.update:
        record(reports, keep=bool(options.quick or options.triton or options.arch or options.only))
    ratchet = json.loads(RATCHET.read_text())
    wrong += [f"{title(one)}: {words}" for one in reports for words in [*one["broken"], *worse(one, ratchet)]]
    summary(reports, versions, archs, time.monotonic() - begin)
    if options.table:
        print_table(reports, archs)
    for words in wrong:
        print(words, file=sys.stderr)
    print(f"{len(wrong)} broken rules" if wrong else "no rule is broken", file=sys.stderr)
    return int(bool(wrong))


def compare_table() -> list[str]:
    found = tritons.differences()
    if found is None:
        print("torch's wheels: not compared, no registry answers")
    elif not found:
        print(f"torch's wheels pin what {tritons.TABLE.name} says")
    return found or []


def title(report: Report) -> str:
    return f"Triton {report['triton']} sm{report['arch']} {report['name']}"


# --- running


def run_all(versions: Iterable[str], archs: Iterable[int], *chosen: str) -> list[Report]:
    """The reports of every kernel under every Triton for every architecture, two processes at a time."""
    folders = {version: tritons.install(version) for version in versions}
    link()
    tasks = list(product(folders.items(), archs))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [one for reports in pool.map(lambda task: run(*task[0], task[1], *chosen), tasks) for one in reports]


def run(version: str, folder: Path, arch: int, which: str, only: str) -> list[Report]:
    """In a process of its own: there is one Triton to a process. Raises RuntimeError where the process fails."""
    results = tritons.CACHE / "results" / f"{version}-sm{arch}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "matrix.compiling.worker", str(arch), which, only, str(results)]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as triton_cache:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(folder), str(tritons.ROOT / ".links"), str(tritons.ROOT / "tests")]),
            "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_CACHE_DIR": triton_cache,
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)} under Triton {version} exited {ran.returncode}: {ran.stderr[-2000:]}")
    reports = [json.loads(line) for line in ran.stdout.splitlines()]
    fresh = sum(one["fresh"] for one in reports)
    seconds = time.monotonic() - begin
    print(f"Triton {version} sm{arch}: {len(reports)} launches, {fresh} compiled now, {seconds:.0f} s", flush=True)
    return reports


def link() -> None:
    """The sources beside this file under their installed names, whatever else is installed: `make links`."""
    links = tritons.ROOT / ".links" / "moedge"
    links.mkdir(parents=True, exist_ok=True)
    for floor in ("quant", "offload", "moe", "runtime", "cli"):
        if not (links / floor).exists():
            (links / floor).symlink_to(f"../../{floor}")


# --- the ratchet


def record(reports: list[Report], keep: bool) -> None:
    """Writes the worst over all Tritons; what was not compiled now keeps its record, if told so."""
    old: Ratchet = json.loads(RATCHET.read_text()) if keep else {}
    found: Ratchet = {}
    for one in reports:
        if "error" in one or one.get("hot", True):
            continue
        entry = found.setdefault(one["name"], {})
        spill, warps = entry.get(str(one["arch"]), [0, one["warps_per_sm"]])
        entry[str(one["arch"])] = [max(spill, one["spill"]), min(warps, one["warps_per_sm"])]
    for name, entry in found.items():
        found[name] = old.get(name, {}) | entry
    lines = [f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted((old | found).items())]
    RATCHET.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def worse(report: Report, ratchet: Ratchet) -> list[str]:
    """Where a kernel that is not hot spills more, or leaves an SM fewer warps, than what is recorded."""
    if report.get("hot", True):
        return []
    recorded = ratchet.get(report["name"], {}).get(str(report["arch"]))
    if recorded is None:
        return [f"{RATCHET.name} has no record of it; run with --update"]
    spill, warps = recorded
    words = []
    if report["spill"] > spill:
        words.append(f"{report['spill']} bytes spill, {spill} are recorded")
    if report["warps_per_sm"] < warps:
        words.append(f"{report['warps_per_sm']} warps an SM, {warps} are recorded")
    return words


# --- words


def summary(reports: list[Report], versions: list[str], archs: Iterable[int], seconds: float) -> None:
    fresh, binaries = sum(one["fresh"] for one in reports), len({one["key"] for one in reports})
    hot = [one for one in reports if one.get("hot")]
    print(
        f"{len(reports)} launches ({len({one['name'] for one in reports})} kinds, {binaries} binaries; {len(hot)} hot) "
        f"under Triton {', '.join(versions)} for {', '.join(f'sm{arch}' for arch in archs)}; "
        f"{fresh} compiled now in {seconds:.0f} s"
    )


def print_table(reports: list[Report], archs: Iterable[int]) -> None:
    """Least warps an SM and most bytes of spill over all sizes and Tritons."""
    cells: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}
    for one in reports:
        if "error" in one or "warps_per_sm" not in one:
            continue
        row = cells.setdefault((one["name"].split()[0].strip(","), group_of(one)), {})
        warps, spill = row.get(one["arch"], (99, 0))
        row[one["arch"]] = (min(warps, one["warps_per_sm"]), max(spill, one["spill"]))
    print("| kernel |" + "".join(f" sm{arch} |" for arch in archs) + "\n|---|" + "---|" * len(list(archs)))
    for (_, words), row in sorted(cells.items()):
        figures = (row.get(arch) for arch in archs)
        print(f"| {words} |" + "".join(f" {one[0]} / {one[1]} |" if one else "  |" for one in figures))


def group_of(report: Report) -> str:
    """The row of the table that a kernel is in."""
    kernel, config = report["name"].split(", ")
    dtype = config.split()[0]
    wide = "fp32" if dtype == "fp32" else "16-bit"
    if kernel in {"merge", "store"}:
        return kernel
    if kernel in {"down", "gate and up"}:
        return f"{kernel}, {wide}, {config.split()[1]}, {' '.join(config.split()[-2:])}"
    return f"{kernel}, {wide}, head {'up to 128' if int(config.split()[2]) <= 128 else 'over 128'}"


if __name__ == "__main__":
    sys.exit(main())
