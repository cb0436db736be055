"""The command ``hecate``. It says what to install where a package that all its commands need is missing.

It lies outside of the package, because importing the package needs torch.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or end with code 1 and what to do."""
    try:
        from hecate.cli import app
    except (ImportError, OSError) as error:
        name = getattr(error, "name", None) or "torch"
        if name.partition(".")[0] == "hecate":
            raise
        # A library that torch itself needs, such as one of CUDA, is missing too, or does not fit.
        print(
            f"hecate: {name} cannot be imported in {sys.executable}: {error}\n"
            "Install what Hecate needs into this environment: pip install torch (pytorch.org has builds for CUDA), "
            "then pip install -e path/to/hecate. In Hecate's own folder, make train does both; then "
            ". .venv/bin/activate",
            file=sys.stderr,
        )
        sys.exit(1)
    app()


if __name__ == "__main__":
    main()
