import sgl_aspects as aspects


@aspects.around("textwrap:shorten")
def louder(original_fn, *args, **kwargs):
    return original_fn(*args, **kwargs).upper()


handle = aspects.weave(louder)  # textwrap is not loaded yet, and this does not load it

from textwrap import shorten  # noqa: E402

print(shorten("Attach, trace, replace: any function", width=30))
print(aspects.report())

handle.remove()  # the copy that was imported above gets its original back, too
print(shorten("Attach, trace, replace: any function", width=30))
