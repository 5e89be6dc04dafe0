"""Prompts to tokens: shapes, model seams, KV cache, attention, scheduler, sampling, engine and jobs.

Importing this package imports no torch, so that commands which only read headers or rows start at once.
"""
