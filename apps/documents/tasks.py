"""Prompts for the usual tasks, and the one that merges partial answers: jinja2 templates, to be printed and edited.

The instruction comes first and the document last, so that all rows begin with the same tokens, which are computed once.
"""

from __future__ import annotations

# `instruction` is the text of --prompt. What depends on a document comes behind everything that does not.
_DOCUMENT = "Document{% if pages %} (pages {{ page }} of {{ pages }}){% endif %}:\n\n{{ text }}"

TASKS = {
    "summarize": (
        "Summarize the document below for a reader who has not seen it. Write at most 150 words of plain prose. State "
        "what the document is, what it says, and the numbers, names and dates that matter. Add nothing that it does "
        "not say.{% if instruction %} {{ instruction }}{% endif %}\n\n" + _DOCUMENT
    ),
    "extract": (
        "Extract the requested fields from the document below. Copy values as they are written there; give dates as "
        "YYYY-MM-DD and numbers without units. Use null for what the document does not say: never guess."
        "{% if instruction %} {{ instruction }}{% endif %}\n\n" + _DOCUMENT
    ),
    "classify": (
        "Classify the document below. Choose the one class that fits its main content best."
        "{% if instruction %} {{ instruction }}{% endif %}\n\n" + _DOCUMENT
    ),
    "translate": (
        "Translate the document below into {{ instruction }}. Translate everything, add nothing, and keep headings, "
        "lists, tables and numbers. Write the translation only.\n\n" + _DOCUMENT
    ),
    "qa": (
        "Answer the question from the document below. Use nothing but the document, and quote the sentence that the "
        "answer is taken from. Where the document does not answer it, write: not stated.\n\n"
        "Question: {{ instruction }}\n\n" + _DOCUMENT
    ),
}
# Tasks that mean nothing without a text of --prompt, and what it has to say.
NEEDS_PROMPT = {"translate": "the language", "qa": "the question"}
# Tasks whose answers are structured.
NEEDS_SCHEMA = ("extract", "classify")

MERGE = (
    "A long document was read in parts, and each part was answered by itself. Combine the partial answers below into "
    "one answer to the request, as if the whole document had been read at once. Say everything once, keep numbers, "
    "names and page numbers, prefer what a part states over what another does not know, and add nothing.\n\n"
    "The request for each part:\n\n{{ request }}\n\nPartial answers, in the order of the document:\n\n{{ text }}"
)
# What the request of a merge has where the document was.
PART = "(the part of the document)"
