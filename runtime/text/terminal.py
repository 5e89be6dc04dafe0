"""Text that nobody vouches for, made fit for a terminal."""

import re

# C0 and C1 controls drive the terminal, bidirectional controls reorder what is read, surrogates cannot be written.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    r"""`text` with every character that could steer a terminal written out (`\x1b`, `\u202e`); \n and \t stay."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape").decode(), text)
