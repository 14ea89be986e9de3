"""``python -m sgl_aspects``: the same as the command ``sgl-aspects``."""

import sys

from sgl_aspects.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
