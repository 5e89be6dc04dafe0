"""Runs every family whole, with the oldest and the newest supported transformers, and writes docs/models.md.

    python -m matrix.families                    this environment's release, then the oldest, then the page
    python -m matrix.families --quarter 2        a quarter of the families in this environment; writes nothing

A family's tiny random checkpoint is saved, read back, streamed at the smallest budget and run packed; greedy tokens in
fp32 must be those of transformers' `generate`. What ran is kept in runs/models, so an interrupted run goes on where it
was; --fresh forgets it. Exits 1 if a family fails in this environment, or if a quarter disagrees with the page.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "runs" / "models"
PAGE = ROOT / "docs" / "models.md"
OLDEST = "5.17"
# Of the oldest transformers' dependencies, those that this environment has in newer releases only.
OLDER = (f"transformers=={OLDEST}.*", "huggingface_hub>=1.5,<2", "httpx")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(ROOT / "tests"))


def run(families: list[str]) -> bool:
    """Runs in this process what has no result yet; returns whether all of them work."""
    import torch
    import transformers

    from support.family_run import run_family

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    path = RESULTS / f"{transformers.__version__}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for family in families:
        if family not in results:
            results[family] = one(family, run_family)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=1, sort_keys=True))
            print(f"{transformers.__version__:8} {family:22} {results[family]}", flush=True)
    return all(results[family] == "works" for family in families)


def one(family: str, run_family) -> str:
    """What became of one family: "works", or why not."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from moedge.offload.errors import BadCheckpoint
    from moedge.runtime.settings.errors import UnsupportedModel

    if family not in CONFIG_MAPPING:
        return "not in this release"
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_family(family, Path(folder)).failure or "works"
        except (BadCheckpoint, UnsupportedModel) as error:
            return f"refused: {error}"


def oldest_python() -> Path:
    """An environment with the oldest supported transformers before this one's packages; made when it is missing."""
    folder = ROOT / "runs" / f"transformers-{OLDEST}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", OLDER[0]], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *OLDER[1:]], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "zz_behind.pth").write_text("\n".join(ours) + "\n")
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quarter", type=int, help="0 to 3; -1 for the day's")
    parser.add_argument("--only-run", action="store_true", help="run this environment's release, write no page")
    parser.add_argument("--fresh", action="store_true", help="forget what ran before")
    options = parser.parse_args()
    from moedge.runtime.shape.families import SUPPORTED
    from support.models_page import page, worked

    if options.fresh and RESULTS.exists():
        for path in RESULTS.glob("*.json"):
            path.unlink()
    if options.quarter is not None:
        quarter = date.today().toordinal() % 4 if options.quarter < 0 else options.quarter
        sys.exit(0 if run_quarter([family for family in SUPPORTED if worked(PAGE, family)][quarter::4]) else 1)
    works = run(list(SUPPORTED))
    if not options.only_run:
        # The links give the installed names to an interpreter that moedge is not installed in.
        environment = {**os.environ, "PYTHONPATH": str(ROOT / ".links")}
        subprocess.run([oldest_python(), __file__, "--only-run"], env=environment, check=False)
        PAGE.write_text(page(sorted(RESULTS.glob("*.json"))))
    sys.exit(0 if works else 1)


def run_quarter(families: list[str]) -> bool:
    """Runs afresh, keeping nothing."""
    from support.family_run import run_family

    failed = {family: result for family in families if (result := one(family, run_family)) != "works"}
    print(f"{len(families)} families, {len(failed)} failed", *failed.items(), sep="\n")
    return not failed


if __name__ == "__main__":
    main()
