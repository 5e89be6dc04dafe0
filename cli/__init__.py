"""What a person types and sees. Parses, calls one thing of the runtime, prints; computes nothing.

Importing it, and `--help`, imports no torch: every command imports what it runs when it runs.
"""
