"""Applications (`apps/`) stand on the public names of the core (`api/face.py`, `cli/face.py`): each can be left out,
and the rest runs.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from moedge import face
from moedge.cli import face as cli_face
from support.import_graph import ImportGraph

ROOT = Path(__file__).parents[2]
APPS = sorted(path.name for path in (ROOT / "apps").iterdir() if (path / "__init__.py").exists())
# What applications import of the core, and what their commands import of the command line.
FACES = (face, cli_face)
MOST_NAMES = 150
PUBLIC = {"api.face", "cli.face"}


def interior(graph: ImportGraph) -> list[str]:
    """What applications import beside the faces and their own files."""
    return [
        f"{module} imports {other}"
        for module, imported in sorted(graph.files.items())
        if module.startswith("apps.")
        for other in sorted(imported)
        if other not in PUBLIC and other.split(".")[:2] != module.split(".")[:2]
    ]


def test_applications_import_public_names_only() -> None:
    assert APPS
    assert interior(ImportGraph(ROOT, ("quant", "offload", "moe", "runtime", "apps", "cli", "api"))) == []


def test_every_name_of_a_face_is_used_by_an_application() -> None:
    """A face that grows by names that nobody needs bounds nothing."""
    nodes = [node for path in (ROOT / "apps").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    for names in FACES:
        tail = names.__name__.removeprefix("moedge.")
        used = {each.name for node in imports if node.module == tail for each in node.names}
        assert set(names.__all__) == used
        assert len(used) <= MOST_NAMES


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_a_face_has_what_it_lists_and_imports_no_torch(face: ModuleType) -> None:
    assert sorted(face.__all__) == face.__all__
    assert all(hasattr(face, name) and not name.startswith("_") for name in face.__all__)
    code = f"import sys, {face.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_application_that_reaches_inside_is_noticed(tmp_path: Path) -> None:
    files = {
        "apps/a/b.py": "from ...face import x\nfrom .c import y\nfrom ...runtime.jobs.folder import z\n",
        "apps/a/c.py": "from ..d import w\n",
    }
    for name in ("apps/a/b.py", "apps/a/c.py", "apps/d/__init__.py", "api/face.py", "runtime/jobs/folder.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(name, ""))
        for folder in path.relative_to(tmp_path).parents:
            (tmp_path / folder / "__init__.py").touch()
    graph = ImportGraph(tmp_path, ("apps", "runtime"))
    assert interior(graph) == ["apps.a.b imports runtime.jobs.folder", "apps.a.c imports apps.d"]


HIDDEN = """
import contextlib
import io
import json
import sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("moedge.apps.") and name.split(".")[2] in NAMES:
            raise ModuleNotFoundError(name, name=name)

NAMES, LOOKED_AT = sys.argv[1].split(","), json.loads(sys.argv[3])
sys.meta_path.insert(0, Hidden())
from moedge.cli.main import main
codes = []
for arguments in json.loads(sys.argv[2]):
    sys.argv = ["moedge", *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as ended:
        codes.append(ended.code or 0)
import moedge
print(codes, *(name for name in LOOKED_AT or moedge.__all__ if not hasattr(moedge, name)))
"""
# Public names that are an application's.
NAMES = {"documents": ["Chunk", "Document", "UnreadDocument", "iter_documents", "run_documents", "split"]}


# Every application alone runs a job in the slow lane.
LEFT_OUT = [
    (APPS, True),
    *(([name], False) for name in APPS),
    *(pytest.param([name], True, marks=pytest.mark.slow) for name in APPS),
]


@pytest.mark.parametrize(("names", "runs"), LEFT_OUT, ids=str)
def test_applications_can_be_left_out(names: list[str], runs: bool, tmp_path: Path) -> None:
    """The rest imports, plans and runs a job."""
    model, rows, out = ROOT / "examples" / "tiny_moe" / "model", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows.write_text('{"prompt": "In the beginning", "max_tokens": 3}\n')
    budget = ("--ram", "1GiB", "--gpu-mem", "0")
    commands = [["--help"], ["jobs", "ls"], ["plan", model, rows, *budget]]
    commands += [["batch", model, rows, "-o", out, "-q", *budget]] * runs
    # All public names import torch.
    looked_at = [] if runs else [each for found in NAMES.values() for each in found]
    line = [sys.executable, "-c", HIDDEN, ",".join(names), json.dumps(commands, default=str), json.dumps(looked_at)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert json.loads(done.stdout.split("]")[0] + "]") == [0] * len(commands), done.stderr
    assert sorted(done.stdout.split("]")[1].split()) == sorted(each for name in names for each in NAMES.get(name, []))
    assert not runs or len(out.read_text().splitlines()) == 1
