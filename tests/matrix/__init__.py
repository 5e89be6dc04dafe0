"""Long correctness runs of what the tests do briefly: `make matrix`, or `python -m matrix` in the folder tests."""
