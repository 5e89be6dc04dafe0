"""What a process gives up before it reads hostile bytes: memory, files, sockets, other processes. Torch-free, Linux.

Limits bound memory. Landlock and a seccomp filter hold native code, too, which Python's audit hooks do not see. All of
it is for good, and inherited by whatever the process starts. The parent stays dumpable: a process that is not cannot
reset its own peak of memory (/proc/self/clear_refs), and is hidden from its user's profilers.
"""

import ctypes
import mimetypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

# What a child may inherit: nothing that could be a key.
_VARIABLES = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TESSDATA_PREFIX",
)  # fmt: skip
_SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/fonts", "/etc/localtime", *mimetypes.knownfiles)
_LIBRARIES = ("/usr/lib", "/lib", "/lib64")
# The same number on every architecture.
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_SET_NO_NEW_PRIVS, _GET_SECCOMP, _SET_SECCOMP, _FILTER = 38, 21, 22, 2
_EXECUTE, _READ = 1, 4 | 8
# By version of Landlock: the highest right on files that it knows, of 64 bits.
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_LATEST_RIGHTS = 16
_NETWORK, _SCOPES = 3, 3

# (machine, number of its calls in a filter): AUDIT_ARCH, calls refused, those that start a process, and those refused
# unless their first argument is this process.
_COMMON = {424, 425, 426, 427, 434, 438, 440, 452}
_CALLS: dict[str, tuple[int, set[int], set[int], int, set[int]]] = {
    "x86_64": (
        0xC000003E,
        # Sockets; other processes; System V; files; mounts and namespaces; keys, bpf, perf, userfaultfd.
        {41, 42, 43, 49, 50, 288, 101, 200, 310, 311, 312, 29, 30, 31, 64, 68, 240, 76, 77, 82, 83, 84, 85, 86, 87, 88,
         90, 91, 92, 93, 94, 132, 133, 188, 189, 190, 197, 198, 199, 235, 258, 259, 260, 261, 263, 264, 265, 266, 268,
         280, 316, 155, 161, 165, 166, 272, 303, 304, 308, 248, 249, 250, 298, 321, 323},
        {57, 58, 59, 322}, 56, {62, 234, 302},
    ),
    "aarch64": (
        0xC00000B7,
        {198, 200, 201, 202, 203, 242, 117, 130, 270, 271, 272, 186, 190, 194, 195, 196, 180, 5, 6, 7, 14, 15, 16, 33,
         34, 35, 36, 37, 38, 45, 46, 52, 53, 54, 55, 88, 276, 39, 40, 41, 51, 97, 264, 265, 268, 217, 218, 219, 241,
         280, 282},
        {221, 281}, 220, {129, 131, 261},
    ),
}  # fmt: skip
_CLONE3, _THREAD = 435, 0x10000
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026

_libc = ctypes.CDLL(None, use_errno=True)


def clean_environment() -> dict[str, str]:
    """The variables that a confined process starts with."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def lacking() -> str:
    """What confines native code and this kernel does not have, in words; empty where nothing is missing."""
    missing = [] if _landlock_version() else ["Landlock"]
    if platform.machine() not in _CALLS or _libc.prctl(_GET_SECCOMP, 0, 0, 0, 0) < 0:
        missing.append("seccomp filters")
    return " and ".join(missing)


def shut_in(
    memory_nbytes: int, files: int, readable: Iterable[Path] = (), programs: Sequence[Path] = (), modules: bool = True
) -> None:
    """From here on this process opens no socket, writes no file, and neither sees nor signals others.

    It takes at most `memory_nbytes` beyond those in use, and descriptors below `files`. It reads what is below
    `readable` and, with `modules`, what Python and shared libraries are loaded from; it starts nothing but `programs`.
    What the kernel lacks is left out (`lacking`). Raises OSError.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    address_space = pages * resource.getpagesize() + memory_nbytes
    _checked(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    if version := _landlock_version():
        _restrict_files(version, [*readable, *(_module_folders() if modules else ())], programs)
    if platform.machine() in _CALLS and _libc.prctl(_GET_SECCOMP, 0, 0, 0, 0) >= 0:
        _filter_calls(may_start=bool(programs))
    for kind, value in (
        (resource.RLIMIT_AS, address_space),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, files),
    ):
        resource.setrlimit(kind, (value, value))


def _module_folders() -> Iterator[Path]:
    yield from map(Path, (*_SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix, *filter(None, sys.path)))
    # An editable installation has the package anywhere.
    yield Path(__file__).parents[2]


def _landlock_version() -> int:
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, 0, 1)))


def _restrict_files(version: int, readable: Iterable[Path], programs: Sequence[Path]) -> None:
    rights = (1 << _RIGHTS.get(version, _LATEST_RIGHTS)) - 1
    # struct landlock_ruleset_attr; a kernel takes fields that it does not know where they are zero.
    rules = struct.pack("QQQ", rights, _NETWORK if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    ruleset = _checked(_libc.syscall(_LANDLOCK_CREATE, rules, len(rules), 0))
    for path in readable:
        _allow(ruleset, path, _READ)
    # A program is started by its loader, which lies among the libraries.
    for path in (*programs, *map(Path, _LIBRARIES if programs else ())):
        _allow(ruleset, path, _EXECUTE | _READ)
    _checked(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0))
    os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    with suppress(FileNotFoundError, NotADirectoryError):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        # Of a file, only rights on files.
        rule = struct.pack("=Qi", rights if path.is_dir() else rights & ~8, descriptor)
        try:
            _checked(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0))
        finally:
            os.close(descriptor)


def _filter_calls(may_start: bool) -> None:
    arch, refused, starting, clone, of_processes = _CALLS[platform.machine()]
    own = os.getpid()
    # struct sock_filter: loads are of the number of a call (0), the architecture (4), the first argument (16).
    steps = [_step(0x20, 4), _step(0x15, arch, 1, 0), _step(6, _KILL), _step(0x20, 0), _step(0x35, 1 << 30, 0, 1)]
    steps.append(_step(6, _EPERM))
    for number in sorted(refused | _COMMON | (set() if may_start else starting)):
        steps += [_step(0x15, number, 0, 1), _step(6, _EPERM)]
    for number in sorted(of_processes):
        steps += [_step(0x15, number, 0, 5), _step(0x20, 16), _step(0x15, own, 2, 0), _step(0x15, 0, 1, 0)]
        steps += [_step(6, _EPERM), _step(6, _ALLOW)]
    if not may_start:
        # glibc starts threads with clone where there is no clone3, whose flags a filter cannot read.
        steps += [_step(0x15, _CLONE3, 0, 1), _step(6, _ENOSYS), _step(0x15, clone, 0, 3), _step(0x20, 16)]
        steps += [_step(0x45, _THREAD, 1, 0), _step(6, _EPERM)]
    steps.append(_step(6, _ALLOW))
    program = ctypes.create_string_buffer(b"".join(steps))
    header = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    _checked(_libc.prctl(_SET_SECCOMP, _FILTER, header, 0, 0))


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"this process could not be confined: {os.strerror(number)}")
    return result
