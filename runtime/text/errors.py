"""Why a tokenizer or a text is refused.

ValueError
├── TokenizerError     the folder's tokenizer cannot be used: nothing can run
└── PromptError        one row's text cannot become a prompt: the other rows go on
    └── TemplateError  the model's chat template failed on one row's messages
"""


class TokenizerError(ValueError):
    """The model folder has no tokenizer that this package can use faithfully."""


class PromptError(ValueError):
    """The text or the messages of one row cannot be turned into token ids."""


class TemplateError(PromptError):
    """The chat template raised, ran too long, wrote too much or took its process down."""
