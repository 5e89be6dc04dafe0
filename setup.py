"""Builds the library of CPU kernels where g++ is found; everything else is in pyproject.toml."""

import importlib.util
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent / "quant" / "native"
spec = importlib.util.spec_from_file_location("native_build", HERE / "build.py")
assert spec is not None
assert spec.loader is not None
native = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = native
spec.loader.exec_module(native)


class BuildWithLibrary(build_py):
    """Copies the packages, then compiles the library beside its loader: in the source tree for an editable install."""

    def run(self) -> None:
        super().run()
        target = native_library(self)
        if not self.editable_mode:
            # What an earlier build left here may be of other sources.
            target.unlink(missing_ok=True)
        try:
            native.build(target)
        except native.CannotBuild as error:
            # Without it everything works, slower.
            self.announce(f"notice: the library of CPU kernels was not built: {error}", level=3)


class TaggedWheel(bdist_wheel):
    """A wheel with the library is for one platform, and for every Python, because ctypes loads it."""

    def get_tag(self) -> tuple[str, str, str]:
        library = native_library(self.get_finalized_command("build_py"))
        if self.distribution.get_command_obj("build_py").editable_mode or not library.is_file():
            return "py3", "none", "any"
        return "py3", "none", native.wheel_platform(library)


def native_library(command: build_py) -> Path:
    folder = HERE if command.editable_mode else Path(command.build_lib) / "moedge" / "quant" / "native"
    return folder / native.LIBRARY


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": TaggedWheel})
