"""Token windows to learn from: half of each batch running text, half packed chat samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from chats import ChatWriter, Message

IGNORED = -100
# Samples written between two refills; one refill feeds some hundred batches.
REFILL = 2000


@dataclass(frozen=True)
class Batch:
    """`ids` and `labels`, both [num_rows, num_tokens]; labels are IGNORED where nothing is to be learned."""

    ids: Tensor
    labels: Tensor


class ChatRows:
    """Packs chat samples into rows; each row begins with a sample, the last one of a row is cut."""

    def __init__(self, writer: ChatWriter, tokenizer: PreTrainedTokenizerFast) -> None:
        self._writer = writer
        self._tokenizer = tokenizer
        self._samples = self._encoded()

    def row(self, num_tokens: int) -> tuple[list[int], list[int]]:
        """The ids and labels of one row."""
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < num_tokens:
            sample_ids, sample_labels = next(self._samples)
            ids += sample_ids
            labels += sample_labels
        return ids[:num_tokens], labels[:num_tokens]

    def _encoded(self) -> Iterator[tuple[list[int], list[int]]]:
        while True:
            samples = [spans(self._writer.write()) for _ in range(REFILL)]
            texts = [text for sample in samples for text, _ in sample]
            encoded = iter(self._tokenizer(texts, add_special_tokens=False).input_ids)
            for sample in samples:
                yield _join([(next(encoded), is_answer) for _, is_answer in sample])


def spans(messages: Sequence[Message]) -> list[tuple[str, bool]]:
    """The chat template's text in pieces, each with whether the model is to learn to write it."""
    pieces: list[tuple[str, bool]] = []
    for message in messages:
        is_answer = message["role"] == "assistant"
        pieces.append((f"<|im_start|>{message['role']}\n", False))
        pieces.append((f"{message['content']}<|im_end|>", is_answer))
        pieces.append(("\n", False))
    return pieces


class Windows:
    """Draws batches: the same seed gives the same batches in the same order."""

    def __init__(self, running: Tensor, chats: ChatRows, seed: int) -> None:
        self._running = running
        self._chats = chats
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self, num_rows: int, num_tokens: int) -> Batch:
        """Half the rows from anywhere in the running text, half of chat samples."""
        num_running = num_rows // 2
        last = len(self._running) - num_tokens
        starts = torch.randint(last + 1, (num_running,), generator=self._generator).tolist()
        plain = torch.stack([self._running[start : start + num_tokens] for start in starts])
        rows = [self._chats.row(num_tokens) for _ in range(num_rows - num_running)]
        ids, labels = (torch.tensor(column) for column in zip(*rows, strict=True))
        return Batch(torch.cat([plain, ids]), torch.cat([plain, labels]))


def _join(pieces: Sequence[tuple[list[int], bool]]) -> tuple[list[int], list[int]]:
    ids = [token for tokens, _ in pieces for token in tokens]
    labels = [token if is_answer else IGNORED for tokens, is_answer in pieces for token in tokens]
    return ids, labels
