"""``python -m sgl_aspects`` is the command ``sgl-aspects``."""

import sys

from sgl_aspects.cli.main import main

sys.exit(main())
