"""Marks around texts tell what users wrote from what a template put between (`runtime/text/control_tokens.py`)."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moedge.runtime.text.control_tokens import Marks, Piece, Span

letters = st.text(st.sampled_from("ab\U000f0000"), max_size=6)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), texts=st.lists(letters, min_size=1, max_size=4))
def test_pieces_are_the_texts_and_exactly_the_spans_are_literal(data: st.DataObject, texts: list[str]) -> None:
    whole = "".join(texts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=6)))
    spans = [Span(start, stop, True) for start, stop in zip(cuts[::2], cuts[1::2], strict=False)]
    marks = Marks(texts, spans, avoid="\U000f0001")
    pieces = [list(marks.pieces(text)) for text in marks.texts]
    assert ["".join(piece.text for piece in row) for row in pieces] == texts
    literal = "".join(piece.text for row in pieces for piece in row if piece.literal)
    assert literal == "".join(whole[span.start : span.stop] for span in spans)


def test_a_mark_that_lost_its_partner_still_keeps_its_sides_apart() -> None:
    marks = Marks(["x<s>y"], [Span(1, 4, True)], avoid="")
    before, after = marks.texts[0].split("s")
    assert list(marks.pieces(before)) == [Piece("x", False), Piece("<", False)]
    assert list(marks.pieces(after)) == [Piece(">", False), Piece("y", False)]


def test_what_a_template_puts_between_two_marks_is_not_literal() -> None:
    marks = Marks(["<s>"], [Span(0, 3, True)], avoid="")
    forged = marks.texts[0].replace("<s>", "</s>")
    assert list(marks.pieces(forged)) == [Piece("</s>", False)]


def test_marks_occur_neither_in_the_texts_nor_in_the_template() -> None:
    marks = Marks(["\U000f0000<s>"], [Span(1, 4, True)], avoid="\U000f0001")
    assert marks.texts == ["\U000f0000\U000f0002<s>\U000f0003"]
