"""Drafts by someone who knows the answer, and errs on purpose: acceptance, rejection and both in one draft at will."""

from collections.abc import Sequence as Items
from random import Random

from moedge.runtime.engine.lookup import Lookup
from moedge.runtime.engine.sequence import Sequence


class Oracle(Lookup):
    """Drafts what follows a prompt of `start` tokens in `wanted`; every `errs`-th token is another, in the mean."""

    __slots__ = ("errs", "random", "start", "wanted")

    def __init__(self, start: int, wanted: Items[int], errs: int = 4, seed: int = 0) -> None:
        super().__init__()
        self.start, self.wanted, self.errs, self.random = start, list(wanted), errs, Random(seed)

    def draft(self, most: int) -> list[int]:
        at = len(self) - self.start
        return [token ^ 1 if self.random.randrange(self.errs) == 0 else token for token in self.wanted[at : at + most]]

    def skips(self) -> bool:
        return False

    def judge(self, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted > 0


def foresee(sequence: Sequence, wanted: Items[int], errs: int = 4, seed: int = 0) -> Sequence:
    """The sequence, whose tokens are guessed from what it is known to generate."""
    sequence.lookup = Oracle(len(sequence.prompt_ids), wanted, errs, seed)
    return sequence
