"""Other engines on the same rows, for bench/compare.py."""
