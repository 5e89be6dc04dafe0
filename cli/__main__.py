"""`python -m moedge.cli` is the command `moedge`."""

from .main import main

main()
