"""Runs every family whole, with this transformers and the oldest supported one, and writes docs/tables/models.md.

A family's tiny random checkpoint is saved, read back, streamed at the smallest budget and run packed; greedy tokens in
fp32 must be those of transformers' `generate`. It is a fault if a family does not work in this environment, or if this
transformers has a type that is neither run nor refused (support/family_walk.py); of the oldest release the page says
which work. Verdicts are in build/matrix/models, a file for each release.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from matrix.state import FOLDER, ROOT, Part, run_parts
from moedge.offload.errors import BadCheckpoint
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.shape.families import SUPPORTED
from support.family_run import run_family
from support.family_walk import unaccounted
from support.models_page import formats_of, page

VERDICTS = FOLDER / "models"
PAGE = ROOT / "docs" / "tables" / "models.md"
OLDEST = "5.17"
# Of the oldest transformers' dependencies, those that this environment has in newer releases only.
OLDER = (f"transformers=={OLDEST}.*", "huggingface_hub>=1.5,<2", "httpx")
QUICK = ("qwen3_moe", "gpt_oss")


def parts(quick: bool) -> Iterator[Part]:
    set_up()
    if quick:
        for family in QUICK:
            yield Part(family, partial(faults, family))
        return
    yield Part(f"types of transformers {transformers.__version__}", unaccounted)
    yield from recorded()
    yield Part(f"transformers {OLDEST} and docs/tables/models.md", write_page)


def set_up() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)


def recorded() -> Iterator[Part]:
    for family in SUPPORTED:
        yield Part(f"transformers {transformers.__version__}, {family}", partial(record, family))


def record(family: str) -> list[str]:
    """Runs the family and writes its verdict down; the fault is the verdict."""
    path = VERDICTS / f"{transformers.__version__}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = verdict(family)
    verdicts = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(verdicts | {family: found}, indent=1, sort_keys=True))
    return [] if found == "works" else [found]


def faults(family: str) -> list[str]:
    found = verdict(family)
    return [] if found == "works" else [found]


def verdict(family: str) -> str:
    """What became of one family: "works", or why not."""
    if family not in CONFIG_MAPPING:
        return "not in this release"
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_family(family, Path(folder)).failure or "works"
        except (BadCheckpoint, UnsupportedModel) as error:
            return f"refused: {error}"


def write_page() -> list[str]:
    """Runs all families with the oldest release, whatever their verdicts, and writes the page of both releases."""
    # The links give the installed names to an interpreter that moedge is not installed in.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / ".links"), str(ROOT / "tests")])}
    subprocess.run([oldest_python(), "-m", "matrix.families"], env=environment, check=False)
    found = sorted(VERDICTS.glob("*.json"))
    if not any(path.stem.startswith(f"{OLDEST}.") for path in found):
        return [f"there are no verdicts of transformers {OLDEST} in {VERDICTS}"]
    PAGE.write_text(page(found) + formats_of(PAGE.read_text()))
    return []


def oldest_python() -> Path:
    """An environment with the oldest supported transformers before this one's packages; made when it is missing."""
    folder = FOLDER / f"transformers-{OLDEST}"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", OLDER[0]], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *OLDER[1:]], check=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "zz_behind.pth").write_text("\n".join(ours) + "\n")
    return python


if __name__ == "__main__":
    # In the environment of the oldest release.
    set_up()
    run_parts(f"families-{transformers.__version__}", recorded())
