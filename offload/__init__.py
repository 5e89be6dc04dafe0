"""Bytes and where they are stored: checkpoint files, prepared weights, rings, the memory of this machine.

Moves opaque bytes of known size; knows neither weight formats, nor models, nor tokens.
"""
