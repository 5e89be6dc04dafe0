"""The command `moedge`, which is `python -m moedge` too."""

import signal


def main() -> None:
    """Runs the command line. Ctrl-C ends it without a word while it is imported: Python would print a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from .cli.main import main as run

    run()


if __name__ == "__main__":
    main()
