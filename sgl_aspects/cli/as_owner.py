"""``sgl-aspects`` in a process that root's command started as another user.

python -m sgl_aspects.cli.as_owner SOCKET WORD ...
"""

from __future__ import annotations

import sys

from sgl_aspects.attach.debugging import use_debugger
from sgl_aspects.cli.main import main

if __name__ == "__main__":
    use_debugger(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
