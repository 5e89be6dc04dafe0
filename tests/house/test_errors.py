"""Every exception class of the package is a MoedgeError (`offload/errors.py`) with an exit code of its own, or never
leaves the package.
"""

import ast
import builtins
import importlib
from collections.abc import Iterator
from pathlib import Path

from moedge.offload.errors import ExitCode, MoedgeError, exit_code_of

ROOT = Path(__file__).parents[2]
FLOORS = ("quant", "offload", "moe", "runtime", "apps", "cli", "api")
# Those that are caught before a command or a caller would see them, and where.
CONTROL_FLOW = {
    "ApiError": "apps/serve/app.py and apps/serve/gate.py, which answer with it",
    "CannotBuild": "setup.py and quant/native/build.py itself, which go on without the library",
    "CannotLink": "runtime/loading/prepare.py, which then copies all weights",
    "DamagedZstd": "runtime/rows/reader.py and runtime/rows/tables.py, which say it of the file",
    "FormatError": "runtime/kv/spec.py and runtime/weights/preparation.py, which know the setting or the checkpoint",
    "InvalidRow": "runtime/rows/reader.py, which makes a RowFailure of it",
    "ReadFailure": "apps/documents/iterate.py, which makes an UnreadDocument of it",
    "_NotRecordable": "runtime/model/graphs.py itself, which launches kernels one by one then",
    "_Refused": "runtime/rows/tables.py itself, which makes InputRefused of it",
    "Stopped": "cli/views/job_view.py, which ends with the code of the signal",
}


def exception_classes(root: Path) -> Iterator[tuple[str, str, set[str]]]:
    """(module, class, names of all its ancestors) of every exception class that is defined under the root."""
    bases: dict[str, tuple[str, list[str]]] = {}
    for path in sorted(path for floor in FLOORS for path in (root / floor).rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = (module, [ast.unparse(base).split(".")[-1] for base in node.bases])

    def ancestors(name: str) -> set[str]:
        own = bases[name][1] if name in bases else []
        return {*own, *(each for base in own if base != name for each in ancestors(base))}

    def builtin(name: str) -> bool:
        kind = getattr(builtins, name, None)
        return isinstance(kind, type) and issubclass(kind, BaseException)

    for name, (module, _) in bases.items():
        if name != "MoedgeError" and any(map(builtin, ancestors(name))):
            yield module, name, ancestors(name)


def outside(root: Path) -> set[str]:
    return {name for _, name, ancestors in exception_classes(root) if "MoedgeError" not in ancestors}


def test_no_exception_class_is_outside_the_family_but_those_for_control_flow() -> None:
    assert outside(ROOT) == set(CONTROL_FLOW)


def test_one_that_is_outside_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "bad.py").write_text("class Bad(KeyError): ...\nclass Worse(Bad): ...\nclass Fine(dict): ...\n")
    assert outside(tmp_path) == {"Bad", "Worse"}


def test_every_refusal_has_a_code_of_its_own() -> None:
    """Which is in docs/reference.md, because test_docs.py compares that page with ExitCode."""
    family = [(module, name) for module, name, ancestors in exception_classes(ROOT) if "MoedgeError" in ancestors]
    assert len(family) > 25
    for module, name in family:
        kind = getattr(importlib.import_module(f"moedge.{module}"), name)
        assert issubclass(kind, MoedgeError)
        assert isinstance(kind.exit_code, ExitCode)
        assert kind.exit_code not in {ExitCode.OK, ExitCode.BUG, ExitCode.SOME_ROWS_FAILED}, name
        raised = kind.__new__(kind)
        assert exit_code_of(raised) is kind.exit_code, name
        assert raised.advice == kind.exit_code.advice, name


def test_memory_that_gives_out_has_its_code_and_everything_else_is_a_bug() -> None:
    assert exit_code_of(MemoryError()) is ExitCode.GAVE_OUT
    assert exit_code_of(KeyError("x")) is exit_code_of(SystemError("another")) is ExitCode.BUG
