"""Reads checkpoint folders as untrusted input: headers, index and files are checked before use. Torch-free."""
