"""A required hook: if the engine has moved the function, the process stops with an error.

A fix that is silently not applied serves wrong answers. `required=True` is for such fixes.

Prints:

    the server did not start
    sgl-aspects: required around hook __main__.safe on colorsys:rgb_to_hsl: module colorsys is loaded
    and has no rgb_to_hsl; close names: rgb_to_hsv, rgb_to_hls, rgb_to_yiq.
"""

import textwrap

import sgl_aspects as aspects


@aspects.around("colorsys:rgb_to_hsl", required=True)  # it is called rgb_to_hls
def safe(original_fn, *args, **kwargs):
    return original_fn(*args, **kwargs)


try:
    aspects.weave(safe)  # colorsys is not loaded: the hook waits
    import colorsys

    print(colorsys.rgb_to_hls(1, 0, 0))
except SystemExit as stop:
    print("the server did not start")
    print(textwrap.fill(str(stop).split(" Correct")[0], 100))
