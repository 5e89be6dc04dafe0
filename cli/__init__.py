"""The command line: parses options, calls the runtime and prints results; computes nothing.

Importing it, and `--help`, imports no torch: every command imports what it needs when it runs.
"""
