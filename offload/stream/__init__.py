"""Bytes that run ahead of compute: a ring of places, lanes that fill them, a schedule that never ends."""
