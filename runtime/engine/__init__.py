"""Sequences, the scheduler, and the step: one pass over all weights. Knows no rows, files or text."""
