"""`python -m monarch` is the `monarch` command."""

import sys

from monarch.cli import main

if __name__ == "__main__":
    sys.exit(main())
