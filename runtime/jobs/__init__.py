"""A job's contracts: rows in, rows out, and the summary of a run.

Knows JSON lines and files; knows no tokenizer, no model and no engine, and imports neither torch nor transformers.
"""
