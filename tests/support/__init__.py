"""What several tests share: tiny models, fakes, simulators, case tables, and rows of files.

`pythonpath = ["tests"]` in pyproject.toml makes it importable as `support`; benchmarks reach it by
bench/support_path.py.
"""
