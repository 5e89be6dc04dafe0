"""Stores of prepared weights on disk: writing resumes after a kill, and only complete stores open. Torch-free."""
