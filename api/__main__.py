"""`python -m moedge` is the command `moedge`."""

from __future__ import annotations

from .cli.main import main

main()
