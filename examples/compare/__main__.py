"""`python -m examples.compare`, from the repository's root. See cli.py."""

from __future__ import annotations

import importlib.util
import sys

_NEEDED = ("typer", "rich", "tqdm", "matplotlib", "transformers")


def main() -> None:
    """Runs the command line. Exits 2 and says what to install where a package is missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        install = "run pip install '.[bench,transformers]' in the repository's root"
        print(f"examples.compare: expected {', '.join(missing)}, found none: {install}", file=sys.stderr)
        sys.exit(2)
    import typer

    from examples.compare import cli

    typer.run(cli.main)


if __name__ == "__main__":
    main()
