"""What tokens that a pass drafts are worth: the same rows with and without, in turns, of a model that streams.

    python -m bench.speculation [--model MODEL] [--ram 900MiB] [--disk 300] [--rows 500] [--rounds 2]

By default SmolLM2-135M-Instruct over paragraphs of Python's help: `quote` asks for the first sentences of each word for
word, as extraction does, `story` for prose that no text has. `--disk` lets a cgroup of the kernel (blkio, version 1,
which takes root) slow the disk to so many MB/s, so that bytes bind where they would not on a fast one, and plans know
it. Every job is a process of its own; prints passes, tokens per second, tokens of a sequence and pass, the share of
drafts that were accepted, seconds of the processor in user mode, and whether the answers are the same text.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

GROUP = Path("/sys/fs/cgroup/blkio/moedge-bench")
QUESTIONS = {
    "quote": "Quote the first three sentences of this text word for word.\n\n{}",
    "story": "Write a short story for children that has nothing to do with this text.\n\n{}",
}


def paragraphs(count: int) -> list[str]:
    """Of 300 to 900 characters, prose and code as they come."""
    found = re.split(r"\n{2,}", "\n\n".join(text for _, text in sorted(topics.items())))
    return [" ".join(each.split()) for each in found if 300 <= len(each) <= 900][:count]


def write_rows(path: Path, task: str, options: argparse.Namespace) -> None:
    with path.open("w") as file:
        for text in paragraphs(options.rows):
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

    settings = {name: getattr(options, name) for name in ("ram", "quant") if getattr(options, name)}
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
        "generated": found.tokens.generated, "user": user, "drafted": speculation.drafted_tokens,
        "accepted": speculation.accepted_tokens, "each": speculation.tokens_per_sequence_and_pass,
        "sequences": found.passes.sequences_mean, "free_tokens": found.plan["free_tokens"],
        "undrafted": found.plan["undrafted"], "waited": found.stalls.disk,
        "text": sorted(output.read_text().splitlines()),
    }))  # fmt: skip


def job(options: argparse.Namespace, task: str, turn: int, speculate: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.speculation", "--one", task, str(turn), speculate]
    command += ["--model", options.model, "--ram", options.ram, "--quant", options.quant, "--disk", str(options.disk)]
    done = subprocess.run([*command, "--folder", str(options.folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(options: argparse.Namespace) -> None:
    print("| rows | speculate | passes | tok/s | seconds | waited | user s | tokens each | accepted | same answers |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for task in options.tasks:
        write_rows(options.folder / f"{task}.jsonl", task, options)
        for turn in range(options.rounds):
            both = {mode: job(options, task, turn, mode) for mode in ("off", "auto")}
            same = sum(ours == theirs for ours, theirs in zip(both["off"]["text"], both["auto"]["text"], strict=True))
            for mode, each in both.items():
                accepted = f"{each['accepted'] / max(1, each['drafted']):.0%} of {each['drafted']:,}"
                print(
                    f"| {task} | {mode} | {each['passes']:,} | {each['tok_s']:.1f} | {each['seconds']:.1f} | "
                    f"{each['waited']:.1f} | {each['user']:.0f} | {each['each']:.2f} | {accepted} | "
                    f"{same} of {options.rows} | {each['sequences']:.1f} {each['free_tokens']} {each['undrafted']}",
                    flush=True,
                )
            off, auto = both["off"], both["auto"]
            print(
                f"{task}: {off['passes'] / auto['passes']:.2f} times fewer passes, {auto['tok_s'] / off['tok_s']:.2f} "
                f"times the tok/s, {auto['user'] / off['user']:.2f} times the processor",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--ram", default="900MiB")
    parser.add_argument("--quant", default="none")
    parser.add_argument("--disk", type=int, default=0, metavar="MB/s")
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=96)
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
        compare(options)


if __name__ == "__main__":
    main()
