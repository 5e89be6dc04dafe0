"""Streams shards ahead of compute: a ring of slots, lanes that fill the slots, and a watchdog. Torch-free."""
