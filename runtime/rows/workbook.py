"""Excel workbooks (.xlsx): the first sheet of one as rows, and a table written as one, cell by cell.

A row at a time is in memory; of a workbook that is read, the texts that its cells share are, too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from io import BufferedReader
from tempfile import TemporaryFile
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

from ..settings.errors import MissingExtra

# What Excel holds: rows in a sheet; 32,767 characters in a cell, some of which count twice; whole numbers of 53 bits.
MOST_ROWS, MOST_CHARACTERS, MOST_INTEGER = 1_048_576, 16_383, 1 << 53
# The texts that cells share are read whole, and take several times as much as Python objects.
_MOST_SHARED_NBYTES = 256 << 20
_SHARED = "xl/sharedStrings.xml"


def read_sheet(raw: BufferedReader) -> Iterator[tuple[Any, ...]]:
    """The values of the cells of the first sheet, row by row: text, numbers, dates, None; of a formula its last result.

    Raises ValueError for what is no workbook, damaged, encrypted or too large, and MissingExtra without openpyxl.
    """
    try:
        from openpyxl import load_workbook
    except ImportError:
        raise MissingExtra("Excel files need openpyxl", "excel") from None
    if (shared := _shared_nbytes(raw)) > _MOST_SHARED_NBYTES:
        most = _MOST_SHARED_NBYTES >> 20
        raise ValueError(f"its texts have {shared >> 20} MiB, at most {most} are read; save it as CSV")
    try:
        raw.seek(0)
        book = load_workbook(raw, read_only=True, data_only=True)
        yield from book.worksheets[0].iter_rows(values_only=True)
    except (BadZipFile, KeyError, ValueError, IndexError, SyntaxError, EOFError) as error:
        # SyntaxError is the base of what XML parsers raise.
        found = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"this is not a whole workbook ({found})") from None


def _shared_nbytes(raw: BufferedReader) -> int:
    try:
        with ZipFile(raw) as archive:
            return sum(each.file_size for each in archive.infolist() if each.filename == _SHARED)
    except BadZipFile:
        # The reader says what it is.
        return 0


def write_sheets(columns: Mapping[str, int], rows: Iterable[Sequence[Any]], sink: Any) -> None:
    """Writes a workbook to `sink(bytes)`: the names of `columns`, and `rows` with a value for each column.

    A column has the characters of its longest text. Text is text, whatever it begins with, and never a formula or a
    link; numbers are numbers. Text longer than a cell goes on in the next columns; rows beyond those of a sheet in
    another sheet. The same rows give the same bytes. Raises MissingExtra without xlsxwriter.
    """
    writer = import_writer()
    widths = {name: max(1, -(-longest // MOST_CHARACTERS)) for name, longest in columns.items()}
    header = [f"{name} ({part + 1})" if part else name for name, width in widths.items() for part in range(width)]
    with TemporaryFile() as file:
        book = writer.Workbook(file, {"constant_memory": True})
        # The time of writing would make every file another one.
        book.set_properties({"created": datetime(2000, 1, 1)})
        for number, row in enumerate(rows):
            line = number % (MOST_ROWS - 1)
            if line == 0:
                sheet = _sheet(book, header)
            at = 0
            for value, width in zip(row, widths.values(), strict=True):
                _write(sheet, line + 1, at, value)
                at += width
        if not book.worksheets():
            _sheet(book, header)
        book.close()
        _copy(file, sink)


def import_writer() -> Any:
    """xlsxwriter. Raises MissingExtra."""
    try:
        import xlsxwriter
    except ImportError:
        raise MissingExtra("Excel files need xlsxwriter", "excel") from None
    return xlsxwriter


def _sheet(book: Any, header: Sequence[str]) -> Any:
    sheet = book.add_worksheet()
    for column, name in enumerate(header):
        sheet.write_string(0, column, name[:MOST_CHARACTERS])
    sheet.freeze_panes(1, 0)
    return sheet


def _write(sheet: Any, row: int, column: int, value: Any) -> None:
    if isinstance(value, str):
        for part, begin in enumerate(range(0, len(value), MOST_CHARACTERS)):
            sheet.write_string(row, column + part, value[begin : begin + MOST_CHARACTERS])
    elif isinstance(value, bool):
        sheet.write_boolean(row, column, value)
    elif value is not None:
        sheet.write_number(row, column, value)


def _copy(file: IO[bytes], sink: Any) -> None:
    file.seek(0)
    while data := file.read(1 << 20):
        sink(data)
