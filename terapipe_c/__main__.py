"""Where the command `terapipe`, which `python -m terapipe_c` is, too, begins. Ctrl-C may come before all that it needs is
imported."""

import sys

__all__ = ["main"]


def main() -> int:
    try:
        from .cli import main as command

        return command()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("terapipe: interrupted", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
