"""``python -m sgl_aspects.tracing.collector RUN_FOLDER``: the collector of a run."""

import contextlib
import os
import sys

from sgl_aspects.tracing.collect.process import main

code = main(sys.argv[1:])
with contextlib.suppress(OSError):  # the reader of the console exporter's output may be gone
    sys.stdout.flush()
    sys.stderr.flush()
# An exporter may still hang in a call that cannot be interrupted; the time limit has passed.
os._exit(code)
