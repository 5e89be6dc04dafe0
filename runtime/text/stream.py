"""The text of one growing sequence: where a stop string ends it, and what may be shown already.

Knows token ids only through a detokenizer. A token costs its own length, however long the text has become.
"""

from collections.abc import Sequence

from .detokenizer import Detokenizer


class TextStream:
    """Text from token ids, cut before the stop string that is complete first.

    Which one that is does not depend on how the text falls into tokens: it is as if characters came one by one. Of two
    that are complete at the same character the longer one cuts.
    """

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, min_tokens: int = 0, drop_newlines: bool = False
    ) -> None:
        """No stop string ends the text in its first `min_tokens` tokens; `drop_newlines` leaves out those it begins
        with. Raises ValueError for an empty stop string, which would end every text before it begins.
        """
        if "" in stops:
            raise ValueError("A stop string is empty; leave it out, or give the characters to stop at.")
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._settled: list[str] = []
        self._fresh: list[str] = []  # the end of _settled that was not taken yet
        self._length = 0
        self._context = ""
        # A stop string that ends in text to come may begin one character short of its length before it.
        self._context_length = max(map(len, self._stops), default=1) - 1
        self._tokens_to_stops = min_tokens
        self._drop_newlines = drop_newlines
        self._ended = False
        self.stopped = False
        self.after = ""  # the stop string that ended the text, and what the last token has behind it

    @property
    def text(self) -> str:
        """The text if no token follows; without a stop string in it, what decoding all ids at once would give."""
        settled = "".join(self._settled)
        self._settled = [settled]
        return settled if self._ended else settled + self._detokenizer.rest

    def append(self, token_id: int) -> None:
        """Adds a token; once the text has ended, tokens add nothing."""
        if self._ended:
            return
        self._tokens_to_stops -= 1
        self.add(self._detokenizer.push(token_id))

    def add(self, piece: str) -> None:
        """Adds text that belongs to no token of this stream."""
        if self._ended:
            return
        if self._drop_newlines and not self._length:
            piece = piece.lstrip("\n")
        self._settle(piece)
        if self._stops and self._tokens_to_stops < 0:
            self._search(piece)

    def finish(self) -> None:
        """No token follows: what was still open becomes text."""
        if not self._ended:
            self._settle(self._detokenizer.rest)
            self._ended = True

    def take(self) -> str:
        """Text that was not taken before and stays whatever comes: no part of a character or of a stop string.

        When the text has ended it is all that is left, and the pieces taken are `text` together.
        """
        fresh = "".join(self._fresh)
        # Length of the longest end of `text` with which a stop string begins.
        lengths = (
            length
            for stop in self._stops
            for length in range(min(len(stop) - 1, len(fresh)), 0, -1)
            if fresh.endswith(stop[:length])
        )
        end = len(fresh) if self._ended else len(fresh) - max(lengths, default=0)
        self._fresh = [fresh[end:]]
        return fresh[:end]

    def _settle(self, piece: str) -> None:
        if piece:
            self._settled.append(piece)
            self._fresh.append(piece)
            self._length += len(piece)

    def _search(self, piece: str) -> None:
        settled = self._context + piece
        opened = self._detokenizer.open
        text = settled + opened
        for stop in self._stops:
            if stop in text:
                self._cut(self._length - len(settled) + self._first_stop(text), opened)
                return
        self._context = settled[max(0, len(settled) - self._context_length) :]

    def _first_stop(self, text: str) -> int:
        """The start of the stop string that ends first in `text`, which must contain one."""
        begins = [(text.find(stop), stop) for stop in self._stops]
        return min((begin + len(stop), begin) for begin, stop in begins if begin >= 0)[1]

    def _cut(self, end: int, opened: str) -> None:
        taken = self._length - sum(map(len, self._fresh))
        whole = "".join(self._settled) + opened
        text, self.after = whole[:end], whole[end:]
        self._settled, self._fresh = [text], [text[taken:]]
        self._ended = self.stopped = True
