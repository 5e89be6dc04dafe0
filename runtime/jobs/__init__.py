"""Jobs: rows in, rows out in input order, the run between them, and its summary.

Rows, answers, files and the summary know no tokenizer and no engine, and import neither torch nor transformers.
"""
