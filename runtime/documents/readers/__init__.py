"""Readers: the bytes of one file to text, by type. They run in processes of their own, with limits; see ../worker.py."""
