"""The hardware of this machine and its measured speeds: disk, memory, link, pinning limit, arithmetic.

Measures how fast bytes move; arithmetic is timed by calling functions that a higher floor passes in.
"""
