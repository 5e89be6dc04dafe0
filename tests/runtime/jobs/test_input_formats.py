"""The same rows in any format give the same answers; what is no such file is refused in words, in bounded memory
(`runtime/rows/tables.py`).
"""

import csv
import gzip
import io
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement

from moedge.offload.atomic_file import AtomicFile
from moedge.runtime.jobs.folder import JobFolder
from moedge.runtime.jobs.session import json_lines
from moedge.runtime.rows.answer_formats import Answers, Completion
from moedge.runtime.rows.reader import read_rows
from moedge.runtime.rows.row import Defaults, RowFailure
from moedge.runtime.rows.tables import InputFormat, convert, input_format
from moedge.runtime.sampling.params import FinishReason
from moedge.runtime.settings import errors
from moedge.runtime.settings.errors import InputRefused, MissingExtra, install_line

ANSWERS = Answers("m", 0, lambda token_id: ("", None))
# Where the process of a job finds tests/support.
TESTS = Path(__file__).parents[2]

Rows = list[dict[str, Any]]
# "a" and not "prompt": text that a column holds, whatever it is.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
rows_of_text = st.lists(
    st.fixed_dictionaries({"id": texts, "a": texts, "note": texts, "temperature": st.sampled_from([0.0, 0.5, 9.0])}),
    min_size=1,
    max_size=5,
)


def as_jsonl(rows: Rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def as_csv(rows: Rows, separator: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], delimiter=separator, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(rows: Rows) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, row_group_size=2)
    return buffer.getvalue()


WRITERS: dict[str, Callable[[Rows], bytes]] = {
    "csv": as_csv,
    "tsv": lambda rows: as_csv(rows, "\t"),
    "json": lambda rows: json.dumps(rows, indent=1, ensure_ascii=False).encode(),
    "parquet": as_parquet,
    "csv.gz": lambda rows: gzip.compress(as_csv(rows)),
    "json.zst": lambda rows: zstandard.compress(json.dumps(rows).encode()),
    "jsonl.zst": lambda rows: zstandard.compress(as_jsonl(rows[:1])) + zstandard.compress(as_jsonl(rows[1:])),
}


def answers_of(path: Path) -> list[str]:
    """What a job would write, with the row's own text in the place of the model's."""
    path.parent.joinpath("job").mkdir(exist_ok=True)
    lines, _ = json_lines(path, input_format(path), JobFolder(path.parent / "job"))
    return [
        ANSWERS.failure(row)
        if isinstance(row, RowFailure)
        else ANSWERS.answer(row, [Completion(str((row.prompts, row.params)), (1,), FinishReason.STOP, 2)])
        for row in read_rows(lines, Defaults(prompt_column="a"))
    ]


@pytest.mark.parametrize("suffix", WRITERS)
@settings(deadline=None, max_examples=10)
@given(rows=rows_of_text)
def test_every_format_gives_the_answers_of_json_lines(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, rows: Rows
) -> None:
    for row in rows:
        # An empty cell is no id, and a line end of a header or cell is as it is.
        row["id"] = "i" + row["id"]
    folder = tmp_path_factory.mktemp("formats")
    (folder / "in.jsonl").write_bytes(as_jsonl(rows))
    (folder / f"in.{suffix}").write_bytes(WRITERS[suffix](rows))
    assert answers_of(folder / f"in.{suffix}") == answers_of(folder / "in.jsonl")


def converted(tmp_path: Path, kind: str, data: bytes) -> list[Any]:
    (tmp_path / "in").write_bytes(data)
    file = AtomicFile(tmp_path / "out")
    try:
        convert(tmp_path / "in", InputFormat(kind), file)
        file.publish()
    finally:
        file.discard()
    return [json.loads(line) if line else None for line in (tmp_path / "out").read_bytes().splitlines()]


def test_cells_of_known_fields_are_read_as_json_and_others_are_text(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf,id,prompt,max_tokens,stop,n,note\n0,01,"a, ""b""\r\nc",5,"[1]",,\n1,2,z,x,,2,\x00null\n'
    first, second = converted(tmp_path, "csv", data)
    assert first == {"column_1": "0", "id": "01", "prompt": 'a, "b"\r\nc', "max_tokens": 5, "stop": "[1]", "note": ""}
    assert second == {"column_1": "1", "id": "2", "prompt": "z", "max_tokens": "x", "n": 2, "note": "\x00null"}
    assert converted(tmp_path, "csv", b"id;prompt\n1;a,b\n") == [{"id": "1", "prompt": "a,b"}]


def test_a_line_of_text_is_a_row_and_a_blank_one_only_counts(tmp_path: Path) -> None:
    assert converted(tmp_path, "txt", b"a\r\n\n  b") == [{"text": "a"}, None, {"text": "  b"}]


def test_times_decimals_lists_and_nan_of_parquet_are_what_json_has(tmp_path: Path) -> None:
    import datetime
    import decimal

    values = {
        "t": datetime.datetime(2026, 1, 2, 3),
        "d": decimal.Decimal("1.50"),
        "l": [{"role": "user"}],
        "f": float("nan"),
    }
    (found,) = converted(tmp_path, "parquet", as_parquet([values]))
    assert found == {"t": "2026-01-02T03:00:00", "d": "1.50", "l": [{"role": "user"}], "f": None}


NOISE = zstandard.compress(random.Random(0).randbytes(999).hex().encode())
HOSTILE = {
    "a quotation mark left open": ("csv", b'a,b\n1,"x\n2,3\n', "line 3: unexpected end of data"),
    "text behind a quotation mark": ("csv", b'a,b\n1,"x"y\n', "expected after"),
    "a field too many": ("csv", b"a,b\n1,2,3\n", "3 fields, the header has 2"),
    "a column twice": ("csv", b"a,a\n", "two columns"),
    "nothing": ("csv", b"", "names of the columns"),
    "no text": ("csv", b"a,b\n1,\x00\xe9\xff\xfe\n", "line 2: byte 4 is not UTF-8"),
    "another encoding of two bytes": ("csv", "a\n日本語の文章です。\n".encode("shift_jis"), "is not UTF-8"),
    "utf-16": ("csv", "a,b\n".encode("utf-16"), "UTF-16"),
    "json lines": ("csv", b'{"a": 1}\n', "--input-format jsonl"),
    "a field of 17 MiB": ("csv", b'a\n"' + (b"x" * 4095 + b"\n") * (17 << 8) + b'"\n', "16 MiB"),
    "a line of 17 MiB": ("csv", b"a\n" + b"x" * (17 << 20), "16 MiB"),
    "many fields of a MiB in one row": ("csv", b"a\n" + b'"' + (b"x" * (1 << 20) + b'\n","') * 18, "16 MiB"),
    "parquet as csv": ("csv", as_parquet([{"a": 1}]), "--input-format parquet"),
    "an array left open": ("json", b'[{"a": 1}', "the end of the file"),
    "a comma too many": ("json", b'[{"a": 1},]', "element 2 of the array is not JSON"),
    "no array": ("json", b'{"a": 1}', "wanted a JSON array"),
    "text behind the array": ("json", b"[] x", "behind the array"),
    "depth": ("json", b"[" * 100_000, "too deep"),
    "a string left open": ("json", b'["' + b"x" * (17 << 20), "16 MiB"),
    "an array in latin-1": ("json", b'["\xe9t\xe9    "]', "not UTF-8"),
    "a cut gzip file": ("csv", gzip.compress(b"a\n" * 99)[:-9], "damaged or cut off"),
    "a cut zstd file": (
        "csv",
        zstandard.compress(random.Random(0).randbytes(999).hex().encode())[:-9],
        "damaged or cut off",
    ),
    "a damaged zstd file": ("csv", b"\x28\xb5\x2f\xfd" + b"\xff" * 99, "damaged or cut off"),
    "half a parquet file": ("parquet", as_parquet([{"a": 1}])[:-9], "not a whole Parquet file"),
    "binary data": ("parquet", as_parquet([{"a": {"bytes": b"x"}}]), "'a.bytes' holds binary data"),
    "an infinity": ("parquet", as_parquet([{"a": float("inf")}]), "row 1"),
}


# As Excel saves "CSV" in Europe: header, a row, and the encoding that the check names.
OLD = {
    "german": ("id;Stadt;Größe;Preis", "1;München;groß;€ 12", "cp1252"),
    "french": ("id,ville,note", "1,Orléans,très élevé à côté de l’hôtel", "cp1252"),  # noqa: RUF001
    "one letter": ("id,name", "1,Müller", "cp1252"),
    "spanish": ("id,name", "1,José Nuñez Peña", "cp1252"),
    "polish": ("id,text", "1,zażółć gęślą jaźń", "cp1250"),
    "russian": ("id;город;заметка", "1;Москва;Это очень большой город, в котором много людей и улиц", "cp1251"),
}


@pytest.mark.parametrize("case", OLD)
@pytest.mark.parametrize("packed", [False, True])
def test_a_table_in_an_old_encoding_is_read_and_named(tmp_path: Path, case: str, packed: bool) -> None:
    header, row, encoding = OLD[case]
    data = f"{header}\r\n{row}\r\n".encode(encoding)
    path = tmp_path / ("in.csv.gz" if packed else "in.csv")
    path.write_bytes(gzip.compress(data) if packed else data)
    folder = JobFolder(tmp_path / "out.job")
    folder.path.mkdir()
    for _ in range(2):
        lines, found = json_lines(path, InputFormat.CSV, folder)
        separator = ";" if ";" in header else ","
        wanted = dict(zip(header.split(separator), row.split(separator), strict=True))
        assert (json.loads(lines.read_text()), found) == (wanted, encoding)


def test_letters_of_an_old_encoding_may_come_late(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"plain words\n" * 60_000 + "Schöne Grüße aus Köln\n".encode("cp1252"))
    lines, found = json_lines(tmp_path / "in.txt", InputFormat.TXT, JobFolder(tmp_path))
    assert found == "cp1252"
    assert json.loads(lines.read_text().splitlines()[-1]) == {"text": "Schöne Grüße aus Köln"}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_such_file_is_refused_in_words(tmp_path: Path, case: str) -> None:
    kind, data, words = HOSTILE[case]
    with pytest.raises(InputRefused) as refused:
        converted(tmp_path, kind, data)
    assert words in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["csv", "json", "jsonl"])
def test_a_zstd_bomb_takes_no_memory(tmp_path: Path, kind: str) -> None:
    """300 MB of one line from a few kilobytes; in a process of its own, because a peak never goes down again."""
    packer, path = zstandard.ZstdCompressor().compressobj(), tmp_path / f"bomb.{kind}"
    start = b'["' if kind == "json" else b"a"
    path.write_bytes(
        packer.compress(start) + b"".join(packer.compress(b"a" * 1_000_000) for _ in range(300)) + packer.flush()
    )
    assert path.stat().st_size < 100_000
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from moedge.runtime.jobs.folder import JobFolder\n"
        "from moedge.runtime.jobs.session import json_lines\n"
        "from moedge.runtime.rows.tables import InputFormat\n"
        "from moedge.runtime.rows.preflight import preflight\n"
        "from moedge.runtime.rows.row import Defaults\n"
        "from moedge.runtime.settings.errors import InputRefused\n"
        "import zstandard\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10\n"
        "before, path = peak(), Path(sys.argv[1])\n"
        "try: print(preflight(json_lines(path, InputFormat(sys.argv[2]), JobFolder(path.parent))[0],"
        " Defaults()).report())\n"
        "except InputRefused as error: print(error)\n"
        "print(peak() - before)"
    )
    found = subprocess.run([sys.executable, "-c", code, path, kind], capture_output=True, check=True, text=True)
    *said, nbytes = found.stdout.splitlines()
    assert "16 MiB" in said[0] or "line_too_long" in said[1]
    assert int(nbytes) < 150 << 20


def test_the_format_goes_by_suffix_then_by_content(tmp_path: Path) -> None:
    contents = {
        "a.csv": b"", "a.tsv.gz": b"", "a.parquet": b"", "a.txt": b"", "a.jsonl": b'{"a": 1}', "b.jsonl": b" [{}]",
        "c.json": b"[", "d.json": b"{", "e": as_parquet([{"a": 1}]), "f.jsonl": b"", "g.jsonl": gzip.compress(b"[")[:9],
    }  # fmt: skip
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    found = {name: str(input_format(tmp_path / name)) for name in contents}
    assert found == {
        "a.csv": "csv", "a.tsv.gz": "tsv", "a.parquet": "parquet", "a.txt": "txt", "a.jsonl": "jsonl",
        "b.jsonl": "json",
        "c.json": "json", "d.json": "jsonl", "e": "parquet", "f.jsonl": "jsonl", "g.jsonl": "jsonl",
    }  # fmt: skip
    assert input_format("-") == "jsonl"
    assert input_format(tmp_path / "a.csv", InputFormat.TXT) == "txt"


@pytest.mark.parametrize(
    ("text", "kind"), [("id,text\n1,x\n", "csv"), ("id\ttext\n1\tx\n", "tsv"), ("a;b\n1;2\n", "csv")]
)
def test_a_table_under_another_name_is_recognized(tmp_path: Path, text: str, kind: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(InputRefused, match=f"looks like {kind}, .*--input-format {kind}"):
        input_format(tmp_path / "rows.jsonl")


def test_packages_of_extras_are_named_where_they_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtra, match=r"pip install .*'pyarrow>=\d+'$"):
        converted(tmp_path, "parquet", b"PAR1")
    with pytest.raises(MissingExtra, match=r"pip install .*'zstandard>=[\d.]+'; or unpack"):
        converted(tmp_path, "csv", zstandard.compress(b"a"))


def test_the_line_that_installs_an_extra_needs_no_index_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not there is installed by its own name, as pyproject.toml requires it, from a clone as from a wheel."""
    declared = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for extra in ("json", "parquet", "zst"):
        (package,) = map(Requirement, declared["optional-dependencies"][extra])
        monkeypatch.setattr(errors, "find_spec", lambda name: name)
        assert shlex.split(install_line(extra)) == ["pip", "install", f"{package.name}{package.specifier}"]
        monkeypatch.setattr(errors, "find_spec", lambda name: None)
        assert install_line(extra).startswith(f"uv pip install --python {sys.executable} ")


def test_a_table_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    path, folder = tmp_path / "in.csv", JobFolder(tmp_path / "job")
    folder.path.mkdir()
    path.write_bytes(b"a\n1\n")
    first = json_lines(path, InputFormat.CSV, folder)[0].stat()
    assert os.path.samestat(first, json_lines(path, InputFormat.CSV, folder)[0].stat())
    path.write_bytes(b"a\n2\n")
    assert json_lines(path, InputFormat.CSV, folder)[0].read_bytes() == b'{"a":"2"}\n'


SCRIPT = """
import sys
from pathlib import Path
from support.jobs import fake_engine as fake
from moedge.runtime.jobs.request import BatchRequest
from moedge.runtime.rows.row import Defaults
fake.install(lambda: fake.FakeEngine(None, float(sys.argv[1])))
defaults = Defaults(prompt_column="text", max_tokens=9)
fake.run(BatchRequest(model="fake", input=Path("in.csv"), output=Path("out.jsonl"), defaults=defaults))
"""


def run(folder: Path, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(seconds)], cwd=folder, env=os.environ | {"PYTHONPATH": str(TESTS)}
    )


@pytest.mark.slow
def test_a_killed_job_over_a_csv_file_ends_with_every_row_once(tmp_path: Path) -> None:
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    for folder in (cut, whole):
        folder.mkdir()
        (folder / "in.csv").write_bytes(
            as_csv([{"id": f"r{row}", "text": f"row\n{row}", "n": row} for row in range(200)])
        )
        (folder / "in.csv").write_bytes((folder / "in.csv").read_bytes().replace(b",n\r\n", b",mine\r\n"))
    killed = run(cut, 0.05)
    journal, end = cut / "out.job" / "journal", time.monotonic() + 60
    while time.monotonic() < end and not (journal.is_file() and journal.read_bytes().count(b'"done"') > 20):
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    assert not (cut / "out.jsonl").exists()
    assert (run(cut, 0).wait(), run(whole, 0).wait()) == (0, 0)
    answers = (cut / "out.jsonl").read_bytes()
    assert answers == (whole / "out.jsonl").read_bytes()
    assert [json.loads(line)["mine"] for line in answers.splitlines()] == [str(row) for row in range(200)]
