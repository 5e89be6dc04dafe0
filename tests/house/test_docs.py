"""What the pages (`docs/`, `README.md`, `SECURITY.md`) say of the contracts is what the code does."""

import ast
import dataclasses
import re
from pathlib import Path

from moedge.apps.documents.readers.content import ReadCode
from moedge.apps.serve.limits import ServerLimits
from moedge.offload.errors import ExitCode
from moedge.runtime.shape.model_shape import ModelShape

DOCS = Path(__file__).parents[2] / "docs"
MAX_USER_PAGES, MAX_USER_WORDS, MAX_README_LINES = 12, 20_000, 120


def table_rows(page: str, section: str = "") -> list[list[str]]:
    """The cells of a page's tables, or of those below one of its headings."""
    text = (DOCS / page).read_text()
    lines = (text.partition(f"\n## {section}\n")[2].partition("\n## ")[0] if section else text).splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if not set(row[0]) <= {"-"}]


def test_every_exit_code_is_documented() -> None:
    documented = {(row[0], row[1], row[3].replace("`", "")) for row in table_rows("reference.md", "Exit codes")[1:]}
    assert documented == {(str(code.value), code.name, code.advice.replace("`", "")) for code in ExitCode}


def test_every_field_of_the_shape_is_documented() -> None:
    documented = [row[0] for row in table_rows("dev/model-shape.md")[1:]]
    assert documented == [field.name for field in dataclasses.fields(ModelShape)]


def test_nothing_in_the_repository_names_a_path_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.])/(work|home/\w+|root)/")
    root = DOCS.parent
    for path in [*root.glob("*.md"), *DOCS.rglob("*.md"), *(root / "bench").rglob("*.py"), root / "pyproject.toml"]:
        assert not pattern.search(path.read_text()), path


def fault_rows() -> dict[str, list[str]]:
    return {row[0]: row for row in table_rows("dev/faults.md") if re.fullmatch(r"[A-Z]\d+", row[0])}


def test_every_fault_of_rows_and_jobs_has_tests_with_its_name() -> None:
    names = " ".join(
        name
        for path in (DOCS.parent / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    )
    cases = [*(f"I{number}" for number in range(1, 17)), *(f"J{number}" for number in range(1, 18))]
    assert [case for case in fault_rows() if case[0] in "IJ"] == cases
    for case in cases:
        assert re.search(rf"_{case.lower()}_", names), case


def test_no_test_names_a_fault_that_the_page_lacks() -> None:
    for path in (DOCS.parent / "tests").rglob("test_*.py"):
        for case in re.findall(r"def test_(?:[a-z]\d+_)*([ijmk]\d+)_", path.read_text()):
            assert case.upper() in fault_rows(), f"{path}: {case}"


def test_every_promise_of_bits_is_a_test_that_exists() -> None:
    promises = table_rows("dev/exactness.md")[1:]
    seen = [row for row in promises if len(row) == 5]
    assert len(seen) > 15
    for what, default, deterministic, test, setting in seen:
        if default == deterministic == "not promised":
            assert (test, setting) == ("", ""), what
            continue
        file, name = test.split("::")
        assert f"def {name}(" in (DOCS.parent / file).read_text(), test
        assert re.match("deterministic; |default; |both", setting), f"{test}: no setting"


def test_every_fault_of_memory_and_settings_is_made_to_happen() -> None:
    rows = [row for case, row in fault_rows().items() if case[0] in "MK"]
    assert [row[0] for row in rows] == [*(f"M{n}" for n in range(1, 11)), *(f"K{n}" for n in range(1, 6))]
    for case, *_, seen_by in rows:
        named = re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", seen_by)
        assert named, case
        for file, test in named:
            text = (DOCS.parent / file).read_text()
            assert f"def {test}(" in text
            assert re.search(rf"\b{case}\b", text, re.IGNORECASE) or f"_{case.lower()}_" in text, (
                f"{file} names no {case}"
            )


def shown_code(page: Path) -> list[tuple[str, str]]:
    """(file, code) of every Python block, whose first line is a comment that names the file."""
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) == page.read_text().count("```python"), "every block names its file"
    return blocks


def is_whole(code: str, source: str) -> bool:
    """Whether code is functions of a source from their first to their last line, and nothing else."""
    whole = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    return {ast.unparse(node) for node in ast.parse(code).body} <= whole


def test_the_design_shows_whole_functions_of_the_tree() -> None:
    shown = shown_code(DOCS / "dev" / "design.md")
    assert [file for file, _ in shown] == ["runtime/engine/engine.py", "runtime/model/fused/decoder.py"]
    for file, code in shown:
        assert code.strip()
        assert is_whole(code, (DOCS.parent / file).read_text()), file


def test_a_collage_of_functions_is_noticed() -> None:
    source = "class A:\n    def f(self):\n        a = 1\n        return a\n    def g(self):\n        return 2\n"
    assert is_whole("def f(self):\n    a = 1\n    return a\n", source)
    for collage in ("def f(self):\n    a = 1\n", "a = 1\nreturn_2 = 2\n", "def f(self):\n    return a\n    a = 1\n"):
        assert not is_whole(collage, source)


def named_files(page: Path) -> set[str]:
    """Files and folders that a page names in backticks by their path from the root."""
    return set(
        re.findall(r"`((?:cli|apps|runtime|moe|offload|quant|tests|bench|api|docs)/[\w./-]*)`", page.read_text())
    )


def test_every_file_that_design_and_internals_name_exists() -> None:
    for page in ("design.md", "internals.md"):
        names = named_files(DOCS / "dev" / page)
        assert len(names) > 20
        assert not [name for name in names if not (DOCS.parent / name).exists()], page


def test_the_design_fits_two_pages() -> None:
    assert len((DOCS / "dev" / "design.md").read_text().splitlines()) <= 150


def links(page: Path) -> set[Path]:
    """Files that a Markdown page links to; web addresses and anchors of the page itself are left out."""
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    files = (target.split("#")[0] for target in targets if not re.match(r"[a-z]+:", target))
    return {(page.parent / file).resolve() for file in files if file}


def not_indexed(folder: Path) -> set[str]:
    """Pages of a folder, and of folders in it, that its README.md does not link to."""
    pages = {page.resolve() for page in folder.rglob("*.md")} - {(folder / "README.md").resolve()}
    return {page.name for page in pages - links(folder / "README.md")}


def broken(pages: list[Path]) -> list[str]:
    """Links to files that do not exist, as `page -> file`."""
    return [f"{page.name} -> {file.name}" for page in pages for file in sorted(links(page)) if not file.exists()]


def lost_anchors(pages: list[Path]) -> list[str]:
    """Links to headings that their pages do not have, as `page -> file#anchor`."""
    lost = []
    for page in pages:
        for file, anchor in re.findall(r"\]\(([^)\s:#]*)#([^)\s]+)\)", page.read_text()):
            target = (page.parent / file).resolve() if file else page
            if target.suffix == ".md" and target.exists() and anchor not in anchors(target):
                lost.append(f"{page.name} -> {target.name}#{anchor}")
    return lost


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def words(text: str) -> int:
    """What stands between blanks and has a letter or a digit: lines of tables are counted, their bars are not."""
    return sum(any(map(str.isalnum, each)) for each in text.split())


def test_users_can_read_their_pages_in_an_evening() -> None:
    pages = [page for page in DOCS.glob("*.md") if page.name != "README.md"]
    assert len(pages) <= MAX_USER_PAGES
    assert sum(words(page.read_text()) for page in pages) <= MAX_USER_WORDS
    assert len((DOCS.parent / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_every_page_is_in_the_index_and_the_readme_links_to_it() -> None:
    assert not not_indexed(DOCS)
    assert not not_indexed(DOCS.parent / "bench" / "results")
    assert (DOCS / "README.md").resolve() in links(DOCS.parent / "README.md")


def test_every_link_resolves() -> None:
    pages = [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md"), *(DOCS.parent / "bench").rglob("*.md")]
    assert not broken(pages)
    assert not lost_anchors(pages)


def test_a_page_outside_the_index_and_a_broken_link_are_noticed(tmp_path: Path) -> None:
    for name, text in (
        ("README.md", "[a](a.md#x) [w](https://example.com/) [m](missing.md) [y](a.md#y-s)"),
        ("a.md", "# Y's"),
        ("b.md", ""),
    ):
        (tmp_path / name).write_text(text)
    assert not_indexed(tmp_path) == {"b.md"}
    assert broken([tmp_path / "README.md"]) == ["README.md -> missing.md"]
    assert lost_anchors([tmp_path / "README.md"]) == ["README.md -> a.md#x", "README.md -> a.md#y-s"]
    assert words("| a | `b` | - | 1.5 % |") == 3


NAMED = re.compile(r"`(?:tests/)?((?:\w+/)+test_\w+\.py)(?:::(\w+))?`")


def unnamed(section: str) -> list[str]:
    """Sentences of a section, in paragraphs and lists, that name no test."""
    paragraphs = re.split(r"\n\n|\n(?=- )", section)
    sentences = [each for text in paragraphs for each in re.split(r"(?<=\.)\s+", " ".join(text.split()))]
    return [each for each in sentences if each and not any(test for _, test in NAMED.findall(each))]


def not_there(text: str) -> list[str]:
    """Tests that a text names and pytest would not collect."""
    root, missing = Path(__file__).parents[2], []
    for file, test in NAMED.findall(text):
        path = root / "tests" / file
        body = ast.parse(path.read_text()).body if path.is_file() else []
        collected = [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        if not collected or (test and test not in collected):
            missing.append(f"{file}::{test}")
    return missing


def test_every_promise_of_security_names_its_test() -> None:
    """The beginning sums up what follows; what is trusted and how to report promise nothing."""
    _, *sections = (DOCS.parent / "SECURITY.md").read_text().split("\n## ")
    promises = {title: text for title, _, text in (section.partition("\n") for section in sections)}
    assert len(NAMED.findall(promises["What is refused"])) > 40
    assert promises.keys() == {"What is trusted", "What is refused", "Where the promise ends", "How to report"}
    assert unnamed(promises["What is refused"]) == unnamed(promises["Where the promise ends"]) == []


def test_every_limit_of_a_server_and_of_a_document_names_its_test() -> None:
    """In the words and the order of the pages; that the tests are there is seen below."""
    codes = re.findall(rf"`({'|'.join(ReadCode)})`", (DOCS / "documents.md").read_text())
    assert set(codes) == set(ReadCode)
    for section, limits in (
        ("Limits of a server", [row[0] for row in table_rows("http.md", "Limits")[1:]]),
        ("Documents that cannot be read", list(dict.fromkeys(codes))),
    ):
        rows = table_rows("dev/faults.md", section)[1:]
        assert [row[0] for row in rows] == limits
        assert [limit for limit, tests in rows if not NAMED.search(f"`{tests}`")] == []


def test_the_limits_of_a_server_are_those_of_the_page() -> None:
    limits = ServerLimits()
    sizes = (limits.body_nbytes, limits.bodies_nbytes, limits.waiting_nbytes)
    counts = (limits.files, limits.queued, limits.batches, limits.chats, limits.requests)
    assert [each for row in table_rows("http.md", "Limits")[1:] for each in row[1].split("; ")] == [
        f"{limits.upload_nbytes >> 20} MiB", f"{limits.stored_nbytes >> 30} GiB",
        *(f"{size >> 20} MiB" for size in sizes), *(f"{count:,}" for count in counts),
        f"{limits.connections:,}, or half of `ulimit -n",
        f"{limits.burst:,} at once, then {limits.requests_per_second:g} a second",
        f"{limits.header_seconds:g} s", f"{limits.idle_seconds:g} s", f"{limits.body_seconds:g} s",
        f"{limits.upload_seconds / 3600:g} h", f"{limits.idle_seconds:g} s",
    ]  # fmt: skip


def test_a_promise_without_a_test_or_with_one_that_is_gone_is_noticed() -> None:
    section = "- **A.** No file is read (`house/test_docs.py::test_x`). No socket is.\n- So is\n  none (`a/test_b.py`)."
    assert unnamed(section) == ["No socket is.", "- So is none (`a/test_b.py`)."]
    assert not_there(section) == ["house/test_docs.py::test_x", "a/test_b.py::"]


def test_every_test_that_stands_for_a_promise_is_there() -> None:
    """In SECURITY.md, with paths from `tests/`, and in the list of faults, where the second of a file may be short."""
    root = Path(__file__).parents[2]
    text = (root / "SECURITY.md").read_text() + (root / "docs" / "dev" / "faults.md").read_text()
    assert len(NAMED.findall(text)) > 30
    assert not_there(text) == []
