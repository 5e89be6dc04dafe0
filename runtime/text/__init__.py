"""Text in and out of token ids: prompts in, continuations out.

A model's chat template is a hostile program here, and a row's text is hostile text. Knows no model and no row format.
"""
