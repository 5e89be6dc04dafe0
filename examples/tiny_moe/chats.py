"""Chat samples drawn from chapters: a prompt about a word, a name or a beginning, answered by verses.

Knows the prompt forms the model is taught. Knows nothing of tokens.
"""

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from corpus import Chapter

Message = dict[str, str]

TOPIC_FORMS = (
    "Tell of {}.",
    "Write about {}.",
    "Speak of {}.",
    "Tell me about {}.",
    "What is said of {}?",
)
MORE_FORMS = ("Go on.", "Continue.", "Tell me more.")
SYSTEM_BRIEF = "Answer with one verse."
SYSTEM_LONG = "Answer at length."
SYSTEM_PLAIN = ("You are a helpful assistant.", "Answer in the words of the King James Version.")

# Topics are words neither so common that every verse has them nor so rare that nothing can be learned.
TOPIC_COUNTS = range(4, 1500)
NOT_TOPIC_WORDS = """
    about above according after again against among another answered because become been before being
    behold best better between beyond both brought called came cast come cometh coming could didst does doest
    doeth done down each either else even ever every first forth found from gave give given goeth going gone
    good great hadst hast have having hear heard here hereof high himself into itself know known last least
    like little made make many mayest mine more moreover most much must myself neither nevertheless none
    nothing only other others otherwise over own part pass passed perhaps place pray rather saith same sawest
    saying says second seeing seen sent shouldest since some something soon spake speak spoken stand stood
    such take taken than that their them themselves then thence there therefore therein thereof these they
    thine thing things this those though thou through throughout thus thyself till together told took toward
    turned twice under until unto upon very went were what whatsoever when whence where wherefore wherein
    whereof wherewith whether which while whither whom whose whosoever will with within without would yea
    years your yourselves hath doth shall shalt should thee also away called cried came among four five seven
    eight nine hundred thousand three twenty thirty forty fifty sixty lest albeit thereby thereon whereby
    hither hitherto round bring bringeth carry carried cause caused commanded put set let went sware
"""
NOT_TOPICS = frozenset(NOT_TOPIC_WORDS.split())
ARTICLES = ("the", "a", "an")


@dataclass(frozen=True)
class Passage:
    """A place in the text: a chapter and the index of a verse in it."""

    chapter: Chapter
    verse: int

    def text(self, num_verses: int) -> str:
        """The verse and those after it, to the chapter's end at most."""
        return "\n".join(self.chapter.verses[self.verse : self.verse + num_verses])


class ChatWriter:
    """Writes chat samples about the given chapters, one after another from one seed."""

    def __init__(self, chapters: Sequence[Chapter], seed: int) -> None:
        self._random = random.Random(seed)
        self._passages = [Passage(chapter, i) for chapter in chapters for i in range(len(chapter.verses))]
        self._places = topic_places(self._passages)
        self._topics = sorted(self._places)
        # The square root keeps rare topics in sight without drowning the common ones.
        self._weights = [len(self._places[topic]) ** 0.5 for topic in self._topics]

    def write(self) -> list[Message]:
        """One conversation: perhaps a system message, then one to three questions with their answers."""
        system, num_verses = self._draw_manner()
        prompt, passage = self._draw_question()
        messages = [*system, _say("user", prompt), _say("assistant", passage.text(num_verses))]
        while self._random.random() < 0.2 and len(messages) < 7:
            follows = Passage(passage.chapter, passage.verse + num_verses)
            if self._random.random() < 0.5 and follows.verse < len(passage.chapter.verses):
                prompt, passage = self._random.choice(MORE_FORMS), follows
            else:
                prompt, passage = self._draw_question()
            messages += [_say("user", prompt), _say("assistant", passage.text(num_verses))]
        return messages

    def _draw_manner(self) -> tuple[list[Message], int]:
        manner = self._random.random()
        if manner < 0.08:
            return [_say("system", SYSTEM_BRIEF)], 1
        if manner < 0.16:
            return [_say("system", SYSTEM_LONG)], self._random.randint(6, 12)
        num_verses = self._random.choice((1, 2, 2, 3, 3, 4, 5))
        if manner < 0.28:
            return [_say("system", self._random.choice(SYSTEM_PLAIN))], num_verses
        return [], num_verses

    def _draw_question(self) -> tuple[str, Passage]:
        if self._random.random() < 0.25:
            passage = self._random.choice(self._passages)
            words = passage.text(1).split()
            beginning = " ".join(words[: self._random.randint(2, max(2, min(10, len(words) - 1)))])
            return f"Continue: {beginning}", passage
        topic = self._random.choices(self._topics, self._weights)[0]
        passage = self._random.choice(self._places[topic])
        second = self._draw_second_topic(topic, passage)
        about = f"{topic} and {second}" if second else topic
        return self._random.choice(TOPIC_FORMS).format(about), passage

    def _draw_second_topic(self, topic: str, passage: Passage) -> str | None:
        found = verse_topics(passage.text(1))
        others = [other for other in found if other in self._places and _noun(other) != _noun(topic)]
        return self._random.choice(others) if others and self._random.random() < 0.35 else None


def topic_places(passages: Sequence[Passage]) -> dict[str, list[Passage]]:
    """Where each topic stands: topic -> passages whose first verse has it."""
    places: defaultdict[str, list[Passage]] = defaultdict(list)
    for passage in passages:
        for topic in verse_topics(passage.text(1)):
            places[topic].append(passage)
    return {topic: found for topic, found in places.items() if len(found) in TOPIC_COUNTS}


def verse_topics(verse: str) -> list[str]:
    """Words to ask about in a verse: names as they are, others with the article they have there."""
    words = re.findall(r"[A-Za-z']+", verse)
    topics = (_topic(before.lower(), word) for before, word in pairwise(words))
    return list(dict.fromkeys(topic for topic in topics if topic))


def _topic(before: str, word: str) -> str | None:
    if word.lower() in NOT_TOPICS:
        return None
    if word[0].isupper():
        return word
    if before in ARTICLES:
        return f"{before} {word}"
    # Without an article, words of up to three letters are verbs and particles.
    return word if len(word) > 3 else None


def _noun(topic: str) -> str:
    return topic.rsplit(maxsplit=1)[-1]


def _say(role: str, content: str) -> Message:
    return {"role": role, "content": content}
