"""What the core asks for: jobs over documents among others, whose rounds are batch jobs. Torch-free."""

from .status import collect_rounds, find_rounds

__all__ = ["collect_rounds", "find_rounds"]
