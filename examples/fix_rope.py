"""The get_rope case: a function that a package re-exports and every model file has a copy of.

A small package of that shape is made here. Replacing the function by its name reaches every copy, earlier
and later ones, and removing the hook restores all of them.

Prints:

    patched by assignment: factory fixed, package slow, llama slow, table slow
    patched by a hook:     factory fixed, package fixed, llama fixed, table fixed
    a model that loads later: fixed
    hook removed:          factory slow, package slow, llama slow, table slow
"""

import importlib
import sys
import tempfile
from pathlib import Path

import sgl_aspects as aspects

FILES = {
    "rotary/__init__.py": "from rotary.factory import get_rope\n",
    "rotary/factory.py": "def get_rope(head_size):\n    return 'slow'\n",
    "models/__init__.py": "",
    "models/llama.py": "from rotary import get_rope\n\nTABLE = {'rope': get_rope}\n",
    "models/qwen.py": "from rotary import get_rope\n",
}


def show(what: str) -> None:
    factory, package, llama = (sys.modules[name] for name in ("rotary.factory", "rotary", "models.llama"))
    found = {
        "factory": factory.get_rope,
        "package": package.get_rope,
        "llama": llama.get_rope,
        "table": llama.TABLE["rope"],
    }
    print(what, ", ".join(f"{name} {get_rope(64)}" for name, get_rope in found.items()))


@aspects.replace("rotary.factory:get_rope")
def fast_rope(head_size):
    return "fixed"


with tempfile.TemporaryDirectory() as folder:
    for name, text in FILES.items():
        path = Path(folder, name)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    sys.path.insert(0, folder)
    importlib.import_module("models.llama")
    factory = importlib.import_module("rotary.factory")

    original = factory.get_rope
    factory.get_rope = fast_rope
    show("patched by assignment:")
    factory.get_rope = original

    handle = aspects.weave(fast_rope)
    show("patched by a hook:    ")
    print("a model that loads later:", importlib.import_module("models.qwen").get_rope(64))
    handle.remove()
    show("hook removed:         ")
