"""What `make test-isa` makes of a probe (`tests/matrix/isa.py`): which settings count."""

from types import ModuleType

import pytest

from matrix import isa

SAID = """onednn_verbose,v1,info,cpu,isa:Intel AVX2
onednn_verbose,v1,primitive,exec,cpu,matmul,gemm:jit:bf16,undef,src:bf16::blocked:ab::f0,,,37x1024:1024x512,42.4
MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64 architecture Intel(R) AVX-512, Lnx 2.60GHz
MKL_VERBOSE SGEMM(T,N,512,37,1024) 40.85ms CNR:AVX2 Dyn:1 FastMM:1 TID:0  NThr:2
BITS  {"capability": "AVX2", "mkl": "aa", "onednn": "bb", "aten": "cc"}
"""


@pytest.fixture
def runner() -> ModuleType:
    return isa


def test_a_probe_is_read(runner: ModuleType) -> None:
    found = runner.read_probe(SAID)
    assert (found.capability, found.onednn_isa, found.onednn_kernels) == ("AVX2", "Intel AVX2", "gemm:jit:bf16")
    assert (found.mkl, found.bits) == ("Intel(R) AVX-512 CNR:AVX2", ("aa", "bb", "cc"))


def test_a_setting_that_changes_nothing_does_not_count(runner: ModuleType) -> None:
    found = runner.read_probe(SAID)
    renamed = runner.read_probe(SAID.replace("isa:Intel AVX2", "isa:Intel AVX").replace("CNR:AVX2", "CNR:AUTO"))
    other = runner.read_probe(SAID.replace('"aa"', '"dd"'))
    before = {runner.BASE: found}
    assert "changes nothing here" in runner.verdict("MKL AVX2", renamed, before)
    assert runner.verdict("MKL AVX2", other, before) == ""
    assert "the same as first" in runner.verdict("second", other, {**before, "first": other})
    assert "cannot run" in runner.verdict("ATen avx512", None, before)


@pytest.mark.parametrize(
    ("changed", "failed", "avx2", "code"), [(2, [], True, 0), (1, [], True, 1), (0, [], False, 0), (2, ["x"], True, 1)]
)
def test_fewer_than_two_settings_that_count_are_a_failure_on_x86(
    runner: ModuleType, changed: int, failed: list[str], avx2: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.conclude(changed, failed, avx2) == code
    assert ("impossible" in capsys.readouterr().out) == (not avx2)
