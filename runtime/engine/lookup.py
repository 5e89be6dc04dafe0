"""Prompt lookup: the next tokens of a sequence, guessed from where its last ones occurred before. Knows no scheduler.

Answers that copy from their prompts repeat its n-grams ("LLMA", Yang et al., "Inference with Reference", 2023; Saxena,
"Prompt Lookup Decoding", 2023). The tokens that a pass drafts so are verified in the same pass: what is drawn at each
position is what would be drawn without them, and a draft is accepted where it is the same. A draft that is a guess
without probabilities needs no more; Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023
have the rule for the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

# Lengths of the n-grams that are looked up, and the most tokens drafted behind one: Saxena's, without single tokens.
NGRAMS = (3, 2)
MOST_DRAFTED = 10
# Passes without a draft behind misses in a row, doubled by each up to this.
MOST_SKIPPED = 64

_TOKEN = array("i").itemsize


class Lookup:
    """The tokens of one sequence as text, 4 bytes each, and how well drafts from it did lately.

    `depth` is how many tokens it should draft next.
    """

    __slots__ = ("_misses", "_skipping", "_text", "depth")

    def __init__(self) -> None:
        self._text = bytearray()
        self.depth = MOST_DRAFTED
        self._misses = self._skipping = 0

    def __len__(self) -> int:
        return len(self._text) // _TOKEN

    def extend(self, token_ids: Iterable[int]) -> None:
        self._text += array("i", token_ids).tobytes()

    def skips(self) -> bool:
        """Whether it drafts nothing in a pass, since it missed before."""
        self._skipping -= 1
        return self._skipping >= 0

    def draft(self, most: int) -> list[int]:
        """The `most` tokens behind the latest earlier occurrence of the last ones, as if the text went on repeating
        itself; none where there is no such occurrence."""
        text = self._text
        for ngram in NGRAMS:
            last = text[-ngram * _TOKEN :]
            end = len(text) - _TOKEN
            while (found := text.rfind(last, 0, max(0, end))) >= 0:
                if found % _TOKEN == 0:
                    begin = found + len(last)
                    repeated = array("i", bytes(text[begin : begin + most * _TOKEN])).tolist()
                    return (repeated * most)[:most]
                end = found + len(last) - 1
        return []

    def judge(self, drafted: int, accepted: int) -> None:
        """Takes the outcome of a draft: the next one is as long as this one went well."""
        if accepted:
            self._misses = self._skipping = 0
            self.depth = min(MOST_DRAFTED, 2 * drafted if accepted == drafted else accepted + 1)
            return
        self._misses += 1
        self.depth, self._skipping = 1, min(MOST_SKIPPED, 2**self._misses // 2)
