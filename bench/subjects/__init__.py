"""The subjects of bench/micro.py: each has options of its own and prints its tables."""
