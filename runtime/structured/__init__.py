"""Structured output: which tokens a sequence may take next, so that its text is JSON of one schema.

llguidance (the extra `json`) does the parsing; here are its limits, its place beside a pass, and its errors.
"""
