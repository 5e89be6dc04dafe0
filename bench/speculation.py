"""What tokens that a pass drafts are worth: the same rows with and without, in turns, of a model that streams.

    python -m bench.speculation --tasks quote --dtype fp32 --ram 950MiB --max-sequences 20 --disk 700 --longest 300 \
        --max-tokens 32
    python -m bench.speculation --model head --complete --speculate mtp --tasks story --rounds 5 --rows 16 \
        --longest 240 --max-tokens 24 --ram 770MiB --dtype fp32

By default SmolLM2-135M-Instruct over paragraphs of Python's help: `quote` asks for the first sentences of each word for
word, as extraction does, `story` for prose that no text has. In fp32 no rounding changes a token. `head` is a tiny
mixture of as many layers as GLM-4.5-Air, with an MTP head that is hardly ever right. `--disk` lets a cgroup of the
kernel (blkio, version 1, which takes root) slow the disk to so many MB/s, so that bytes bind where they would not on a
fast one, and plans know it. Every job is a process of its own, and the two of a round change places; prints passes,
tokens per second, tokens of a sequence and pass, the share of drafts that were accepted, seconds of the processor in
user mode, bytes read, whether the answers are the same text, what the plan expects to bind, and medians of the rounds'
ratios.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

# Settings of jobs that are options here, too.
GIVEN = ("ram", "quant", "dtype", "max_sequences", "deterministic")
# The name of a tiny mixture of as many layers as GLM-4.5-Air, and a head.
HEAD = "head"
GROUP = Path("/sys/fs/cgroup/blkio/moedge-bench")
QUESTIONS = {
    "quote": "Quote the first three sentences of this text word for word.\n\n{}",
    "story": "Write a short story for children that has nothing to do with this text.\n\n{}",
}


def paragraphs(count: int, longest: int) -> list[str]:
    """Different ones of 200 to `longest` characters, prose and code as they come: of the topics of Python's help, then
    of the standard library's docstrings."""
    found: dict[str, None] = {}
    for text in chain((text for _, text in sorted(topics.items())), docstrings()):
        pieces = (" ".join(each.split()) for each in re.split(r"\n{2,}", text))
        found |= dict.fromkeys(each for each in pieces if 200 <= len(each) <= longest)
        if len(found) >= count:
            return list(found)[:count]
    raise SystemExit(f"{len(found)} paragraphs were found, {count} are wanted; give fewer --rows or a larger --longest")


def docstrings() -> Iterator[str]:
    """Those of the modules of the standard library beside `os`."""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def write_rows(path: Path, task: str, options: argparse.Namespace) -> None:
    with path.open("w") as file:
        for text in paragraphs(options.rows, options.longest):
            prompt = QUESTIONS[task].format(text)
            asked = {"prompt": prompt} if options.complete else {"messages": [{"role": "user", "content": prompt}]}
            print(json.dumps(asked | {"max_tokens": options.max_tokens}), file=file)


def slow_disk(megabytes: int, state: Path) -> None:
    """Puts this process into a group that reads so many MB/s; `state` gets the machine's profile with such a disk."""
    from platformdirs import user_state_path

    device = os.stat(".").st_dev
    GROUP.mkdir(exist_ok=True)
    limit = f"{os.major(device)}:{os.minor(device)} {megabytes * 1_000_000}"
    (GROUP / "blkio.throttle.read_bps_device").write_text(limit)
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    profile = json.loads((user_state_path("moedge") / "machine.json").read_text())
    for machine in profile["machines"]:
        for read in machine["disk"]["reads"]:
            read["bytes_s"] = min(read["bytes_s"], megabytes * 1e6)
    (state / "moedge").mkdir(parents=True, exist_ok=True)
    (state / "moedge" / "machine.json").write_text(json.dumps(profile))
    os.environ["XDG_STATE_HOME"] = str(state)


def run(options: argparse.Namespace) -> None:
    """One job, in this process; prints its numbers as JSON."""
    if options.disk:
        slow_disk(options.disk, options.folder / "state")
    import moedge

    settings: dict[str, Any] = {name: found for name in GIVEN if (found := getattr(options, name))}
    if options.deterministic:
        settings["deterministic"] = True
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    output = options.folder / f"{options.task}-{options.turn}-{options.speculate}.jsonl"
    rows = options.folder / f"{options.task}.jsonl"
    found = moedge.run_batch(
        options.model, rows, output, progress=False, temperature=0.0, speculate=options.speculate, **settings
    )
    user = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before
    speculation = found.speculation
    print(json.dumps({
        "passes": found.passes.count, "tok_s": found.throughput.generated_tok_s, "seconds": found.seconds.generate,
        "generated": found.tokens.generated, "user": user, "read": found.bytes.disk_to_host,
        "drafted": speculation.drafted_tokens, "accepted": speculation.accepted_tokens,
        "each": speculation.tokens_per_sequence_and_pass, "sequences": found.passes.sequences_mean,
        "free_tokens": found.plan["free_tokens"], "undrafted": found.plan["undrafted"], "waited": found.stalls.disk,
        "binds": found.predicted.bottleneck, "notes": found.plan["notes"],
        "text": sorted(output.read_text().splitlines()),
    }))  # fmt: skip


def job(options: argparse.Namespace, task: str, turn: int, speculate: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.speculation", "--one", task, str(turn), speculate]
    command += ["--model", options.model, "--disk", str(options.disk), "--folder", str(options.folder)]
    given = {name: getattr(options, name) for name in GIVEN}
    command += [f"--{name.replace('_', '-')}={found}" for name, found in given.items() if found]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(options: argparse.Namespace) -> None:
    print("| rows | speculate | passes | tok/s | seconds | waited | user s | read MB | tokens each | accepted | same |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for task in options.tasks:
        write_rows(options.folder / f"{task}.jsonl", task, options)
        ratios: dict[str, list[float]] = {name: [] for name in ("passes", "tok_s", "user", "read")}
        for turn in range(options.rounds):
            # In turns, so that what else the machine does is not always beside the same one.
            modes = ("off", options.speculate)[:: -1 if turn % 2 else 1]
            both = {mode: job(options, task, turn, mode) for mode in modes}
            off, ours = both["off"], both[options.speculate]
            same = sum(one == other for one, other in zip(off["text"], ours["text"], strict=True))
            for mode, each in both.items():
                accepted = f"{each['accepted'] / max(1, each['drafted']):.0%} of {each['drafted']:,}"
                print(
                    f"| {task} | {mode} | {each['passes']:,} | {each['tok_s']:.1f} | {each['seconds']:.1f} | "
                    f"{each['waited']:.1f} | {each['user']:.1f} | {each['read'] / 1e6:.0f} | {each['each']:.2f} | "
                    f"{accepted} | {same} of {options.rows} | {each['sequences']:.1f} {each['free_tokens']} "
                    f"{each['undrafted']} {each['binds']} {each['notes']}",
                    flush=True,
                )
            for name, found in ratios.items():
                found.append(ours[name] / off[name] if off[name] else 1.0)
        print(
            f"{task}, median of {options.rounds} pairs, {options.speculate} to off: "
            + ", ".join(f"{median(found):.3f} {name}" for name, found in ratios.items()),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--ram", default="900MiB")
    parser.add_argument("--quant", default="none")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--speculate", default="auto", choices=["auto", "mtp"], help="what is compared with off")
    parser.add_argument("--disk", type=int, default=0, metavar="MB/s")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--longest", type=int, default=900, metavar="CHARACTERS")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-sequences", type=int, default=0)
    parser.add_argument("--deterministic", type=int, default=0, metavar="1")
    parser.add_argument("--complete", action="store_true", help="prompts, for a model without a chat template")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--tasks", nargs="+", default=list(QUESTIONS), choices=list(QUESTIONS))
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--one", nargs=3, metavar=("TASK", "TURN", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.model:
        from support.real.smollm2 import smollm2

        options.model = str(smollm2())
    if options.one:
        options.task, options.turn, options.speculate = options.one
        run(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        options.folder = options.folder or Path(folder)
        if options.model == HEAD:
            from support.tiny_mtp import save_mtp

            options.model = str(save_mtp("glm4_moe", Path(folder) / "model", layers=46))
        compare(options)


if __name__ == "__main__":
    main()
