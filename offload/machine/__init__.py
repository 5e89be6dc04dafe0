"""What this machine is and how fast it was measured to be: disk, memory, link, pinning, arithmetic.

Measures places and bytes; arithmetic is timed by calling what a higher floor hands down.
"""
