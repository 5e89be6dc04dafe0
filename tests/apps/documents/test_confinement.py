"""Native code that has taken over a reader, or a template's process (`runtime/text/confinement.py`): what it may still
do, and what is said where the kernel lets it.
"""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moedge.apps.documents.document import Document, UnreadDocument
from moedge.apps.documents.iterate import iter_documents
from moedge.apps.documents.reader_process import ReadLimits, ReadOptions
from moedge.apps.documents.readers import pdf
from moedge.apps.documents.readers.content import detect
from moedge.runtime.text import confinement
from moedge.runtime.text.confinement import clean_environment, lacking

# Each returns 0 where it was refused, as a C compiler's machine code, which passes no audit hook of Python.
NATIVE = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
static int opens(const char *path, int flags) { int fd = open(path, flags, 0600); return fd >= 0 ? close(fd), 1 : 0; }
int try_socket(const char *folder, int port) { return socket(AF_INET, SOCK_STREAM, 0) >= 0; }
int try_connect(const char *folder, int port) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (int fd = 0; fd < 64; fd++) if (connect(fd, (void *)&to, sizeof to) == 0) return 1;
  return 0;
}
int try_unix(const char *folder, int port) { return socket(AF_UNIX, SOCK_STREAM, 0) >= 0; }
int try_netlink(const char *folder, int port) { return socket(AF_NETLINK, SOCK_RAW, 0) >= 0; }
int try_open(const char *folder, int port) { return opens(folder, O_RDONLY) || opens("/etc/passwd", O_RDONLY); }
int try_create(const char *folder, int port) {
  char path[4096]; snprintf(path, sizeof path, "%s/new", folder); return opens(path, O_WRONLY | O_CREAT);
}
int try_truncate(const char *folder, int port) {
  char path[4096]; snprintf(path, sizeof path, "%s/kept", folder);
  return truncate(path, 0) == 0 || opens(path, O_WRONLY | O_TRUNC);
}
int try_unlink(const char *folder, int port) {
  char path[4096]; snprintf(path, sizeof path, "%s/kept", folder); return unlink(path) == 0;
}
int try_rename(const char *folder, int port) {
  char path[4096], to[4100]; snprintf(path, sizeof path, "%s/kept", folder); snprintf(to, sizeof to, "%s2", path);
  return rename(path, to) == 0;
}
int try_mkdir(const char *folder, int port) {
  char path[4096]; snprintf(path, sizeof path, "%s/made", folder); return mkdir(path, 0700) == 0;
}
int try_chmod(const char *folder, int port) {
  char path[4096]; snprintf(path, sizeof path, "%s/kept", folder); return chmod(path, 0777) == 0;
}
int try_execve(const char *folder, int port) {
  char *argv[] = {"/bin/sh", "-c", "exit 0", 0}; execve(argv[0], argv, 0); return 0;
}
int try_fork(const char *folder, int port) { pid_t p = fork(); if (p == 0) _exit(0); return p > 0; }
// Not PTRACE_ATTACH, which would stop the test where it succeeds.
int try_ptrace(const char *folder, int port) { return ptrace(PTRACE_SEIZE, getppid(), 0, 0) == 0; }
int try_memory(const char *folder, int port) {
  char byte; struct iovec here = {&byte, 1}, there = {(void *)0x400000, 1};
  long n = syscall(SYS_process_vm_readv, getppid(), &here, 1, &there, 1, 0);
  char path[64]; snprintf(path, sizeof path, "/proc/%d/mem", getppid());
  return n >= 0 || errno == EFAULT || opens(path, O_RDWR);
}
int try_kill(const char *folder, int port) { return kill(getppid(), 0) == 0; }
int try_uring(const char *folder, int port) { char p[256] = {0}; return syscall(425, 4, p) >= 0; }
int try_environment(const char *folder, int port) {
  char path[64]; snprintf(path, sizeof path, "/proc/%d/environ", getppid());
  return getenv("HF_TOKEN") != 0 || getenv("MOEDGE_API_KEY") != 0 || opens(path, O_RDONLY) ||
         opens("/proc/self/environ", O_RDONLY);
}
int try_privileges(const char *folder, int port) {
  char line[256]; FILE *f = fopen("/proc/self/status", "r"); return f != 0;
}
"""
READER = """
import ctypes
library = ctypes.CDLL({library!r})
def read(data, name):
    attempt = name.removesuffix(".own")
    return "granted" if getattr(library, "try_" + attempt)({folder!r}.encode(), {port}) else "refused"
"""
ATTEMPTS = [line.split("(")[0].removeprefix("int try_") for line in NATIVE.splitlines() if line.startswith("int try_")]


def test_native_code_in_a_reader_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    code, elsewhere, files = (tmp_path / name for name in ("code", "elsewhere", "files"))
    for each in (code, elsewhere, files):
        each.mkdir()
    (code / "native.c").write_text(NATIVE)
    library = code / "native.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, code / "native.c"], check=True)
    (elsewhere / "kept").write_text("kept")
    for attempt in ATTEMPTS:
        (files / f"{attempt}.own").write_text("content")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("MOEDGE_API_KEY", "a secret")
    monkeypatch.chdir(code)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (code / "native_reader.py").write_text(READER.format(library=str(library), folder=str(elsewhere), port=port))
        options = ReadOptions("native_reader:read", languages=None)
        found = list(iter_documents(files, options=options, workers=1))
    outcome = {each.source.removesuffix(".own"): each.text for each in found if isinstance(each, Document)}
    granted = {name for name, text in outcome.items() if text != "refused"}
    assert set(outcome) == set(ATTEMPTS), [each for each in found if isinstance(each, UnreadDocument)]
    if not lacking():
        assert granted == set()
        assert (elsewhere / "kept").read_text() == "kept"
        assert [each.name for each in elsewhere.iterdir()] == ["kept"]


def test_where_the_kernel_lacks_it_it_is_said(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here, so that no run of tests passes on a kernel that lets native code out without a word."""
    from moedge.apps.doctor.host import Verdict
    from moedge.apps.doctor.host import check_confinement as check

    assert (check().verdict is Verdict.OK) == (lacking() == "")
    monkeypatch.setattr(confinement, "_landlock_version", lambda: 0)
    monkeypatch.setattr(confinement.platform, "machine", lambda: "riscv64")
    assert lacking() == "Landlock and seccomp filters"
    assert "Landlock and seccomp filters" in check().found
    # A run says it before anything is read.
    assert cli("docs", "model", tmp_path / "nowhere", "-o", tmp_path / "out.jsonl", "--prompt", "x") != 0
    assert "this kernel has no Landlock and seccomp filters: readers of documents" in capsys.readouterr().err


def test_a_template_s_process_is_shut_in_too() -> None:
    code = (
        "import ctypes, os\nfrom moedge.runtime.text.template_worker import confine\nconfine()\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "if not (forked := libc.fork()): os._exit(0)\n"
        "calls = [libc.socket(2, 1, 0), forked, libc.ptrace(0x4206, os.getppid(), 0, 0), libc.kill(os.getppid(), 0),\n"
        "         libc.unlink(b'/nowhere/at/all')]\n"
        "print(calls, ctypes.get_errno())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The file is not even looked for: the call is not permitted.
    assert done.stdout == "[-1, -1, -1, -1, -1] 1\n" or lacking()


def test_a_confined_process_inherits_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    assert clean_environment()["LANG"] == "C.UTF-8"
    assert "a secret" not in clean_environment().values()


def test_seconds_are_those_of_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop ends at its limit; a reader that waits as long, as on a busy machine, goes on."""
    monkeypatch.chdir(tmp_path)
    source = "def read(data, name):\n    while name == 'loop.txt': pass\n    time.sleep(1.5)\n    return 'read'\n"
    (tmp_path / "slow_reader.py").write_text("import time\n" + source)
    (tmp_path / "loop.txt").write_text("x")
    (tmp_path / "wait.txt").write_text("x")
    options = ReadOptions("slow_reader:read", limits=ReadLimits(seconds=1.0))
    loop, wait = iter_documents(tmp_path, include=["*.txt"], options=options, workers=1)
    assert isinstance(loop, UnreadDocument)
    assert loop.code == "document_time_limit"
    assert isinstance(wait, Document)


@pytest.mark.parametrize(("data", "name", "kind"), [
    (b"<!-- a --> " * 500 + b"text", "a.txt", "text"),
    (b"<!-- a -->\n" * 300 + b"<?xml version='1.0'?> <!DOCTYPE html>", "a.txt", "html"),
    (b" \n" * 2000 + b"<", "a.txt", "text"),
    (b"<?xml " * 600, "a.txt", "text"),
    (b"From: a\nTo: b\nSubject: c\n" + b" continued\n" * 200_000 + b"\nbody", "a.txt", "email"),
    (b"From: a\nTo: b\n" + b" \r\n" * 200_000, "a.txt", "text"),
])  # fmt: skip
def test_the_type_of_a_file_is_found_in_a_moment(data: bytes, name: str, kind: str) -> None:
    before = time.process_time()
    assert detect(data, name) == kind
    # A thousandth of this is usual; patterns that try every way took minutes.
    assert time.process_time() - before < 2


def test_a_script_that_stands_for_tesseract_brings_its_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pdf.tesseract() == []
    program = tmp_path / "tesseract"
    program.write_text("#!/bin/sh -e\n")
    program.chmod(0o755)
    assert pdf.tesseract() == [program, Path("/bin/sh")]
    program.write_bytes(b"\x7fELF")
    assert pdf.tesseract() == [program]
