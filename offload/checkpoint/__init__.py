"""Checkpoint folders as hostile bytes: headers, index and files, checked before anything is believed. Torch-free."""
