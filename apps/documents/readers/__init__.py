"""Readers: the bytes of one file to text, by type. They run in limited processes; see worker.py."""
