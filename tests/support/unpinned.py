"""Pinned memory on a machine without an accelerator: SGLang's adapters ask for it on any device.

``PLUGIN`` is the code of a plugin for each process of a server.
"""

PLUGIN = """
import functools

def activate():
    import torch

    def plain(function):
        @functools.wraps(function)
        def called(*args, pin_memory=False, **kwargs):
            return function(*args, **kwargs)
        return called

    for name in ("tensor", "empty", "zeros", "ones", "full"):
        setattr(torch, name, plain(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *args, **kwargs: tensor
"""
