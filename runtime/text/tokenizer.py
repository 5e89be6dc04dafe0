"""The tokenizer of one model: prompts to token ids, token ids to text.

In every prompt, control tokens come from the model's own template and never from the text of a row. Knows no rows.
"""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from ..settings.errors import PromptError
from .chat import ChatTemplate
from .control_tokens import ControlTokens, Marks
from .detokenizer import decoding
from .encoder import Encoder
from .folder import TokenizerFolder, read_folder
from .limits import check_text
from .messages import Message
from .stream import TextStream


class TokenText(NamedTuple):
    """One token as shown beside its probability; `text` has U+FFFD where `data` is not whole characters."""

    text: str
    data: bytes


class Tokenizer:
    """Encodes prompts and decodes answers; one thread at a time. Close it to end its template's process."""

    def __init__(self, folder: TokenizerFolder, now: datetime) -> None:
        """`now` is the date that templates get when they ask for it."""
        self.eos_token_ids = folder.eos_token_ids
        self._backend = folder.backend
        self._controls = ControlTokens(folder.backend, folder.template or "", folder.unknown_id)
        self._encoder = Encoder(folder.backend, self._controls.ids)
        self._decoding = decoding(folder.backend)
        self._chat: ChatTemplate | None = None
        if folder.template is not None:
            self._chat = ChatTemplate(folder.template, folder.special_tokens, self._controls, now)

    @classmethod
    def load(cls, folder: Path, now: datetime | None = None) -> Self:
        """The tokenizer in a model folder; raises `TokenizerError`. Without `now` it is the time of this call."""
        return cls(read_folder(folder), now or datetime.now())

    @property
    def num_tokens(self) -> int:
        """Ids of the vocabulary with its added tokens; a model's logits are often wider."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that texts leave out."""
        return self._decoding.vocabulary.special_ids

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt that is to be continued, with what the tokenizer itself adds (such as BOS).

        Raises `PromptError`.
        """
        check_text(text, "the prompt")
        spans = self._controls.spans(text)
        if not spans:
            return self._encoder.text(text)
        marks = Marks([text], spans, avoid="")
        return self._encoder.pieces(marks.pieces(marks.texts[0]), affixes=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of the model's chat prompt for its next answer. Raises `PromptError`, `TemplateError` among them."""
        if self._chat is None:
            raise PromptError("The model has no chat template; give its rows as prompts to complete, not as messages.")
        return self._encoder.pieces(self._chat.pieces(messages), affixes=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def stream(self, stops: Sequence[str] = ()) -> TextStream:
        """A text that grows token by token and ends before the first of `stops`."""
        return TextStream(self._decoding.detokenizer(), stops)

    def token_text(self, token_id: int) -> TokenText:
        """The token by itself, as in the middle of a text."""
        data = self._decoding.data(token_id)
        return TokenText(data.decode(errors="replace"), data)

    def close(self) -> None:
        """Ends the template's process; the tokenizer stays usable."""
        if self._chat is not None:
            self._chat.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
