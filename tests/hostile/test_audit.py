"""Loading a checkpoint (`runtime/model/loading.py`) opens no socket, starts no process, and runs no code that came with
it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# The child finds `support` in its working directory.
TESTS = Path(__file__).parents[1]
FORBIDDEN = (
    "socket.connect",
    "socket.bind",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "pickle.find_class",
)
LOAD = """
import gc, json, sys

gc.disable()
from pathlib import Path
from support.hostile.load import load_weights
from moedge.runtime.shape.checkpoint_shape import read_shape

folder, seen = Path({folder!r}), []
# What Python and torch do when they are imported is not the checkpoint's doing.
load_weights(Path({good!r}), read_shape(Path({good!r})))


def watch(event, arguments):
    if event in {forbidden!r}:
        seen.append(event)
    if event == "import" and any(str(folder) in str(argument) for argument in arguments):
        seen.append("import from the folder")
    if event == "compile" and str(folder) in str(arguments[1]):
        seen.append("compile from the folder")
    if event == "open" and str(arguments[0]).startswith(str(folder)):
        seen.append(Path(arguments[0]).name)


sys.addaudithook(watch)
load_weights(folder, read_shape(folder))
print(json.dumps(seen))
import subprocess
subprocess.run(["true"])
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def baited(good_folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good checkpoint with everything beside it that has made loaders run code."""
    parent = tmp_path_factory.mktemp("audit")
    folder = parent / "baited"
    folder.mkdir()
    for path in good_folders[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    bait = f"open({str(parent / 'ran')!r}, 'w')"
    for name in ("modeling_qwen3_moe.py", "configuration_qwen3_moe.py", "sitecustomize.py", "torch.py", "__init__.py"):
        (folder / name).write_text(bait)
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "evil/repo"}')
    config = json.loads((folder / "config.json").read_text())
    config |= {"_name_or_path": "evil/repo", "architectures": ["evil.Model"], "dtype": "os.system", "num_labels": 10**9}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def events(good_folders: list[Path], baited: Path) -> tuple[list[str], list[str]]:
    """What was seen while the checkpoint was loaded, and after a process was started besides."""
    code = LOAD.format(folder=str(baited), good=str(good_folders[0]), forbidden=FORBIDDEN)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=TESTS)
    loaded, started = map(json.loads, run.stdout.splitlines())
    return loaded, started


def test_a_checkpoint_runs_nothing_and_reaches_nothing(events: tuple[list[str], list[str]], baited: Path) -> None:
    assert set(events[0]) <= {"config.json", "model.safetensors"}
    assert not (baited.parent / "ran").exists()


def test_the_watch_sees_what_it_forbids(events: tuple[list[str], list[str]]) -> None:
    assert "subprocess.Popen" in events[1]
