"""The entry point of `ep-bench`, which is also `python -m ep_plugin.bench`."""

from __future__ import annotations

import sys

_EXTRA = ("typer", "rich", "tqdm", "matplotlib")


def main() -> None:
    """Runs the command line. If a package is missing, names the extra that installs it, and exits with status 2."""
    try:
        from ep_plugin.bench.cli import main as command_line

        command_line(prog_name="ep-bench")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        install = "run pip install '.[bench]' in the repository's root"
        print(f"ep-bench: expected {missing}, found none: {install}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
