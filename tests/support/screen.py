"""A terminal that keeps what it shows, for tests of what a person sees."""

import io
import re

_TOKEN = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(.)", re.DOTALL)


class Screen(io.StringIO):
    """A text stream that says it is a terminal; `lines(width)` are what such a one shows after all that was written.

    It knows what rich writes: new lines, returns, cursor up, and erasing the line. Colours are ignored.
    """

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True

    def lines(self, width: int) -> list[str]:
        shown, row, column = [""], 0, 0
        for number, command, character in _TOKEN.findall(self.getvalue()):
            if command == "A":
                row = max(0, row - int(number or 1))
            elif command == "K":
                shown[row] = shown[row][:column] if number in ("", "0") else ""
            elif character == "\r":
                column = 0
            elif character == "\n" or (character and column == width):
                row, column = row + 1, 0
                shown += [""] * (row == len(shown))
            if character and character not in "\r\n":
                shown[row] = shown[row][:column].ljust(column) + character + shown[row][column + 1 :]
                column += 1
        return [line.rstrip() for line in shown]
