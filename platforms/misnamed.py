"""Attributes of a platform class that no engine reads, though their names look like those that one does."""

from __future__ import annotations

import difflib

from sgl_aspects.platforms.mm_platform import MMPlatform
from sgl_aspects.platforms.srt_platform import SRTPlatform

#: Names from proposals for SGLang and from other engines' platforms, and the name that is called.
OTHER_NAMES = {
    "apply_worker_patches": "init_backend",
    "check_and_update_config": "apply_server_args_defaults",
    "create_kv_pool": "get_kv_pool_cls",
    "get_attn_backend_cls": "get_attention_backends",
    "get_device_communicator_cls": "get_communicator_class",
    "get_dsa_kv_pool_cls": "get_nsa_kv_pool_cls",
    "get_torch_profiler_activity": "get_profiler_activities",
    "initialize_device": "init_backend",
}


def misnamed_attributes(platform_class: type) -> dict[str, str]:
    """Return each suspicious attribute of a vendor's class, and the name that it probably should have.

    A helper whose name resembles none of the interface is not among them.
    """
    ours = {
        name
        for cls in (SRTPlatform, MMPlatform, *platform_class.__mro__)
        if cls.__module__.startswith("sgl_aspects.")
        for name in dir(cls)
    }
    found = {}
    for cls in platform_class.__mro__:
        for name in vars(cls):
            if name in ours or name.startswith("_") or cls is object:
                continue
            near = difflib.get_close_matches(name, [each for each in ours if each[0] != "_"], 1, cutoff=0.84)
            right = OTHER_NAMES.get(name) or (near[0] if near else "")
            if right:
                found[name] = right
    return found
