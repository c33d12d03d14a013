"""`ep-bench`, and `python -m ep_plugin.bench`: the command line, where what it needs is installed."""

from __future__ import annotations

import sys

_EXTRA = ("typer", "rich", "tqdm", "matplotlib")


def main() -> None:
    """Runs the command line; exits 2, saying what to install, where a package of the extra `bench` is missing."""
    try:
        from ep_plugin.bench.cli import main as command_line

        command_line(prog_name="ep-bench")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        print(f"ep-bench: expected {missing}, found none: pip install 'ep_plugin[bench]'", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
