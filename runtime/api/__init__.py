"""moedge from Python: `LLM`, `plan` and `run_batch`, which the commands use too. docs/python.md is the guide."""

from ..settings.process import settle

# Before torch is loaded, as the command line does: its threads and allocators read the environment once.
settle()
