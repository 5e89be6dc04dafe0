"""The tests of benchmarks have the environment and the tiny checkpoints of all tests."""

from tests.conftest import _interruptible, _own_state, _two_threads, checkpoint  # noqa: F401
