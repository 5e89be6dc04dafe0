"""The King James Version as chapters of verses: fetched from its Debian packages, parsed, and split.

Knows the packages, the print form of their `bible` program and which chapters are kept from training.
Knows nothing of tokens.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("bible-kjv", "bible-kjv-text")
WHOLE_TEXT = "gen1:1-rev22:21"

# Chapters without a near copy elsewhere in the book (no Chronicles, no synoptic gospel), of every genre.
HELD_OUT: Mapping[str, range] = {
    "Genesis": range(42, 46),
    "Ruth": range(1, 5),
    "Proverbs": range(14, 17),
    "Isaiah": range(49, 54),
    "Jonah": range(1, 5),
    "Acts": range(19, 23),
    "Hebrews": range(3, 8),
}
WATCHED: Mapping[str, range] = {
    "Exodus": range(3, 6),
    "Job": range(36, 40),
    "Daniel": range(4, 6),
    "John": range(9, 11),
    "James": range(1, 4),
}


@dataclass(frozen=True)
class Chapter:
    """One chapter: its book, its number from 1, its verses in order."""

    book: str
    number: int
    verses: tuple[str, ...]

    @property
    def text(self) -> str:
        """A heading line, then one verse a line."""
        return "\n".join((f"{self.book} {self.number}", *self.verses))

    def is_in(self, parts: Mapping[str, range]) -> bool:
        """Whether `parts` (book -> chapter numbers) names this chapter."""
        return self.number in parts.get(self.book, ())


@dataclass(frozen=True)
class Split:
    """Chapters to learn from, to watch while learning, and to measure on at the end only."""

    training: list[Chapter]
    watched: list[Chapter]
    held_out: list[Chapter]


def fetch_chapters() -> list[Chapter]:
    """Downloads the packages with apt, unpacks them into a temporary folder and reads the whole text.

    Raises subprocess.CalledProcessError where apt-get, dpkg or the unpacked program fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "-qq", "download", *PACKAGES], cwd=folder, check=True)
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, folder], check=True)
        # The line limit keeps each verse on one line; without it the program breaks lines at 79.
        command = [f"{folder}/usr/bin/bible", "-p", f"{folder}/usr/lib", "-l", "100000", WHOLE_TEXT]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return parse(printed)


def parse(printed: str) -> list[Chapter]:
    """Reads the program's print form: a `Book N` line, a blank line, then indented numbered verses."""
    chapters: list[Chapter] = []
    blocks = re.split(r"^(\S.*) (\d+)$", printed, flags=re.MULTILINE)[1:]
    for book, number, body in zip(blocks[::3], blocks[1::3], blocks[2::3], strict=True):
        verses = tuple(re.findall(r"^  +\d+ +(.+?) *$", body, flags=re.MULTILINE))
        chapters.append(Chapter(book, int(number), verses))
    return chapters


def split(chapters: Iterable[Chapter]) -> Split:
    """Sorts chapters into the three parts that HELD_OUT and WATCHED name."""
    parts = Split([], [], [])
    for chapter in chapters:
        if chapter.is_in(HELD_OUT):
            parts.held_out.append(chapter)
        elif chapter.is_in(WATCHED):
            parts.watched.append(chapter)
        else:
            parts.training.append(chapter)
    return parts


def running_text(chapters: Iterable[Chapter]) -> str:
    """Chapters one after another with a blank line between."""
    return "\n\n".join(chapter.text for chapter in chapters) + "\n"
