"""Bytes in places: checkpoint files, arenas, memory of this machine.

Moves opaque bytes of known size; knows neither weight formats, nor models, nor tokens.
"""
