import sys

import sgl_aspects as aspects


@aspects.around("shlex:join")
def louder(original_fn, *args, **kwargs):
    return original_fn(*args, **kwargs).upper()


handle = aspects.weave(louder)
print("loaded already:", "shlex" in sys.modules)

from shlex import join  # noqa: E402

print(join(["attach", "trace", "replace"]))
print(aspects.report())

handle.remove()  # the copy that was imported above gets its original back, too
print(join(["attach", "trace", "replace"]))
