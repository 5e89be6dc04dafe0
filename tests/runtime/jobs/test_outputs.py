"""Case I15 of the failure table: what a job must not write to."""

import os
import random
from hashlib import blake2b
from pathlib import Path

import pytest

from moedge.runtime.jobs.outputs import claim_output, keep_example
from moedge.runtime.settings.errors import OutputExists, OutputRefused


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("{}")
    return path


@pytest.mark.parametrize(
    ("out", "errors"),
    [("out.jsonl", "out.errors.jsonl"), ("out", "out.errors.jsonl"), ("a.b.jsonl", "a.b.errors.jsonl")],
)
def test_the_other_names_derive_from_the_stem(tmp_path: Path, source: Path, out: str, errors: str) -> None:
    paths = claim_output(tmp_path / out, source)
    assert (paths.out.name, paths.errors.name) == (out, errors)
    assert paths.partial.name == errors.replace("errors", "partial")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl"])
@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_i15_nothing_that_exists_is_overwritten(tmp_path: Path, source: Path, name: str, kind: str) -> None:
    if kind == "file":
        (tmp_path / name).write_text("precious")
    else:
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputExists, match="move it away"):
        claim_output(tmp_path / "out.jsonl", source)


@pytest.mark.parametrize("name", ["out.jsonl", "out.errors.jsonl", "out.partial.jsonl"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_i15_the_input_is_never_an_output_under_any_of_its_names(
    tmp_path: Path, source: Path, name: str, link: object
) -> None:
    link(source, tmp_path / name)  # type: ignore[operator]
    with pytest.raises(OutputRefused, match="is the input"):
        claim_output(tmp_path / "out.jsonl", source)
    with pytest.raises(OutputRefused, match="is the input"):
        claim_output(tmp_path / "out.jsonl", tmp_path / name)


def test_i15_the_input_itself_is_refused(tmp_path: Path, source: Path) -> None:
    for spelling in (source, tmp_path / "." / source.name, os.path.relpath(source)):
        with pytest.raises(OutputRefused, match="is the input"):
            claim_output(spelling, source)


def test_i15_the_models_folder_is_refused(tmp_path: Path, source: Path) -> None:
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (tmp_path / "alias").symlink_to(model)
    for folder in (model, model / "sub", tmp_path / "alias", model / "sub" / ".."):
        with pytest.raises(OutputRefused, match="belongs to the model"):
            claim_output(folder / "out.jsonl", source, model)
    claim_output(tmp_path / "out.jsonl", source, model)


def test_a_folder_that_is_missing_or_given_instead_of_a_file_is_refused(tmp_path: Path, source: Path) -> None:
    with pytest.raises(OutputRefused, match="create it first"):
        claim_output(tmp_path / "absent" / "out.jsonl", source)
    with pytest.raises(OutputRefused, match="give a file name"):
        claim_output(tmp_path, source)
    with pytest.raises(OutputRefused, match="not compressed"):
        claim_output(tmp_path / "out.jsonl.gz", source)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(OutputRefused, match="not writable"):
        claim_output(tmp_path / "locked" / "out.jsonl", source)


def test_the_standard_input_is_no_file_to_compare_with(tmp_path: Path) -> None:
    assert claim_output(tmp_path / "out.jsonl", "-").out == tmp_path / "out.jsonl"


@pytest.mark.parametrize("seed", range(5))
def test_examples_are_the_shortest_answers_and_a_sample_of_the_others(seed: int) -> None:
    """In whatever order rows come: those that were short for a while are drawn as fairly as all others."""
    draw = random.Random(seed)
    rows = {f"r{number}": "x" * draw.randrange(1, 900) for number in range(200)}
    order = draw.sample(sorted(rows), len(rows))
    found: dict[str, str] = {}
    for each in order:
        keep_example(found, each, rows[each])
    by_length = sorted(rows, key=lambda each: (len(rows[each][:600]), each))
    others = sorted(by_length[5:], key=lambda each: blake2b(each.encode()).digest())
    assert found == {each: rows[each][:600] for each in (*by_length[:5], *others[:5])}
