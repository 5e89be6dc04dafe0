"""The numerics tests under other instruction sets than this processor's best: `make test-isa`.

One machine stands for others. A setting is an environment that tells torch, oneDNN or MKL to do without some
instructions. A probe, in a process of its own, shows by the libraries' own words and by the bits of products whether it
changed what computes: one that changes nothing on this processor is reported and does not count, and one that comes to
the same as a setting before it is not run again. Fails if a test does, or if fewer than two settings changed anything
on an x86 processor with AVX2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = "as it is"
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
# With tiles of AMX oneDNN packs matrices by functions of torch that exist from AVX-512 on only: where torch does
# without AVX-512, as no processor with AMX would, oneDNN must, too.
NO_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
# In this order: what several settings come to is run once, under the first.
SETTINGS: dict[str, dict[str, str]] = {
    BASE: {},
    "AVX2 everywhere": AVX2,
    "ATen default, MKL compatible": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", **NO_AMX},
    "oneDNN AVX512_CORE": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "oneDNN AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "ATen default": {"ATEN_CPU_CAPABILITY": "default", **NO_AMX},
    "ATen avx2": {"ATEN_CPU_CAPABILITY": "avx2", **NO_AMX},
    "ATen avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "MKL AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "MKL AVX512": {"MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "MKL_CBWR AUTO": {"MKL_CBWR": "AUTO"},
    "MKL_CBWR AVX2": {"MKL_CBWR": "AVX2"},
}
# What `.ci/run` takes the first two of that change something: what processors without AVX-512 and without AVX2 lack,
# and other orders of sums for processors on which the first changes nothing.
BRIEF = (BASE, "AVX2 everywhere", "ATen default, MKL compatible", "MKL_CBWR AUTO")
# Whatever stands in the caller's environment is no setting of ours.
VARIED = {"DNNL_MAX_CPU_ISA", *(name for setting in SETTINGS.values() for name in setting)}
WANTED = 2
PARALLEL = ("--numprocesses", "auto", "--dist", "worksteal")
PROBE_SECONDS, TEST_SECONDS = 120, 1200

# Run with the libraries' verbose lines on: prints one line of JSON among them.
PROBE = """
import hashlib, json, torch
generator = torch.Generator().manual_seed(0)
x, w = (torch.randn(n, 1024, generator=generator) for n in (37, 512))
def digest(*tensors):
    return hashlib.sha256(b"".join(t.float().numpy().tobytes() for t in tensors)).hexdigest()[:10]
# So that oneDNN says what it found even where nothing below is computed by it.
torch._int_mm(x.to(torch.int8), w.t().to(torch.int8))
print("BITS ", json.dumps({
    "capability": torch.backends.cpu.get_cpu_capability(),
    "mkl": digest(*(x[:n] @ w.t() for n in (1, 2, 7, 16, 37)), torch.bmm(x.view(1, 37, -1), w.t().unsqueeze(0))),
    "onednn": digest(*(x[:n].to(t) @ w.t().to(t) for n in (1, 7, 37) for t in (torch.bfloat16, torch.half))),
    "aten": digest(x.softmax(1), x.sigmoid(), x.tanh(), x.cos(), x.sum(1), x.square().mean(1), x.exp()),
}))
"""


@dataclass(frozen=True, slots=True)
class Found:
    """What computes in an environment: torch's capability, oneDNN's and MKL's own lines, and the bits of each."""

    capability: str
    onednn_isa: str
    onednn_kernels: str
    mkl: str
    bits: tuple[str, str, str]

    @property
    def path(self) -> tuple[object, ...]:
        """Equal where nothing else computes; names of instruction sets that no kernel was taken for do not count."""
        return self.capability, self.onednn_kernels, self.bits

    def line(self) -> str:
        kernels = self.onednn_kernels or "no kernel of its own"
        return f"torch {self.capability}; oneDNN {self.onednn_isa}: {kernels}; MKL {self.mkl}"


def environment(setting: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in VARIED}
    return {"OMP_WAIT_POLICY": "passive", **kept, **setting}


def probe(setting: dict[str, str]) -> Found | None:
    """None where this processor cannot run so."""
    verbose = {**environment(setting), "ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=verbose, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
    )
    if done.returncode:
        return None
    return read_probe(done.stdout)


def read_probe(said: str) -> Found:
    """From the verbose lines of both libraries and the probe's own."""
    bits = json.loads(_first(r"^BITS  (.*)$", said))
    kernels = sorted(set(re.findall(r"primitive,exec,cpu,matmul,([^,]+),", said)))
    build = _first(r"^MKL_VERBOSE oneMKL .*? for Intel\(R\) 64 architecture (.*?),? Lnx", said)
    mode = _first(r"\b(CNR:\S+)", said)
    return Found(
        bits["capability"],
        _first(r"info,cpu,isa:(.*)$", said),
        ", ".join(kernels),
        f"{build or 'absent'} {mode}".strip(),
        (bits["mkl"], bits["onednn"], bits["aten"]),
    )


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


def verdict(name: str, found: Found | None, before: dict[str, Found]) -> str:
    """Why a setting is not run; empty where it is."""
    if found is None:
        return "this processor cannot run so, not counted"
    same = next((other for other, each in before.items() if each.path == found.path), "")
    if same == BASE:
        return "changes nothing here, not counted"
    return f"the same as {same}, not counted again" if same else ""


def run_tests(setting: dict[str, str], marked: str) -> tuple[str, bool]:
    """What pytest counted of the tests that are marked so, and whether all passed."""
    # Only files that have some: collecting all of them takes half a minute.
    files = [str(path) for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.numerics" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", marked, "-p", "no:cacheprovider", *PARALLEL, *files]
    begun = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, env=environment(setting), capture_output=True, text=True, timeout=TEST_SECONDS, check=False
    )
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", done.stdout.splitlines()[-1] if done.stdout else "")
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n", flush=True)
    return f"{', '.join(counts) or 'nothing ran'} in {time.monotonic() - begun:.0f} s", done.returncode == 0


def has_avx2() -> bool:
    """Whether there is something to leave out."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    return platform.machine() in {"x86_64", "AMD64"} and re.search(r"\bavx2\b", flags) is not None


def conclude(changed: int, failed: list[str], avx2: bool) -> int:
    """Says how it stands; the exit code."""
    print(f"{changed} settings changed what computes", end="")
    print("" if avx2 else ": not an x86 processor with AVX2, where that is impossible; nothing else was shown")
    if failed:
        print("tests failed under: " + ", ".join(failed))
    if avx2 and changed < WANTED:
        print(f"wanted {WANTED} settings that change what computes: see what the probes found above")
    return int(bool(failed) or (avx2 and changed < WANTED))


def main(brief: bool, probe_only: bool) -> int:
    before: dict[str, Found] = {}
    failed: list[str] = []
    print("| setting | what computes | numerics tests |\n|---|---|---|")
    for name in BRIEF if brief else SETTINGS:
        if brief and len(before) > WANTED:
            break
        found = probe(SETTINGS[name])
        said = verdict(name, found, before)
        if found is not None and not said:
            before[name] = found
            if probe_only:
                said = "to be run"
            elif brief and name == BASE:
                said = "run by `make test`"
            else:
                said, passed = run_tests(SETTINGS[name], "numerics and not slow" if brief else "numerics")
                failed += [] if passed else [name]
        print(f"| {name} | {found.line() if found else '-'} | {said} |", flush=True)
    return conclude(len(before.keys() - {BASE}), failed, has_avx2())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brief", action="store_true", help="two settings, without the slow tests: what .ci/run takes")
    parser.add_argument("--probe", action="store_true", help="say what each setting changes, run no test")
    arguments = parser.parse_args()
    sys.exit(main(arguments.brief, arguments.probe))
