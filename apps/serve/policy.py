"""What requests get of a pass beside the rows of a batch: a policy of the core's scheduler."""

from dataclasses import dataclass

from ...face import Draft, Scheduler, Sequence


@dataclass(slots=True)
class _Tally:
    """Slots that running sequences have, those of interactive ones, and the most tokens of these.

    Kept while interactive ones start: adding all up again for each would take quadratic time.
    """

    claimed: int
    interactive: int
    longest: int

    def start(self, sequence: Sequence) -> None:
        self.claimed += sequence.num_slots
        self.interactive += sequence.num_slots
        self.longest += _longest(sequence)


def interactive_first(scheduler: Scheduler, draft: Draft) -> None:
    """Urgent sequences are those of requests, somebody waits for their next token: they come before the others.

    Where they find no block or no slot in the pass, the youngest of the others is preempted for them. While there are
    others, all interactive ones together get half of the tokens, of the slots and of the cache; one of them may always
    run.
    """
    running = [sequence for sequence in scheduler.running if sequence.urgent]
    if not running and not scheduler.urgent:
        return
    others = len(scheduler.running) > len(running) or bool(scheduler.waiting)
    left_to_others = draft.tokens_left // 2 if others else 0
    draft.tokens_left -= left_to_others
    scheduler.proceed(running, draft)
    slots, longest = sum(each.num_slots for each in running), sum(map(_longest, running))
    tally = _Tally(scheduler.num_claimed, slots, longest)
    while draft.tokens_left and scheduler.urgent:
        claim = _accepts(scheduler, scheduler.urgent[0], others, draft, tally)
        if not claim:
            break
        tally.start(scheduler.urgent[0])
        scheduler.start(scheduler.urgent.popleft(), claim, draft)
    draft.tokens_left += left_to_others


def _accepts(scheduler: Scheduler, sequence: Sequence, others: bool, draft: Draft, tally: _Tally) -> int:
    """The slots of an interactive sequence that may start now, else 0; makes what it needs free where it may.

    `others`: they must keep half of the slots of a pass and half of the cache.
    """
    claim = min(sequence.num_slots, scheduler.limits.live)
    if not scheduler.count_tokens(sequence, draft.tokens_left):
        return 0
    if others and tally.interactive:
        slots, longest = claim + tally.interactive, _longest(sequence) + tally.longest
        if slots > scheduler.limits.live // 2 or not scheduler.cache.fits(2 * longest):
            return 0
    while not scheduler.opens(sequence, claim, tally.claimed, draft):
        # Interactive ones come first: if the last is one, all are.
        if not scheduler.running or scheduler.running[-1].urgent:
            return 0
        youngest = scheduler.running[-1]
        draft.spare_rows += youngest.num_slots
        tally.claimed -= youngest.num_slots
        scheduler.preempt(youngest)
    return claim


def _longest(sequence: Sequence) -> int:
    """Tokens that it and its forks hold at most."""
    return sum(each.max_tokens for each in (sequence, *sequence.forks))
