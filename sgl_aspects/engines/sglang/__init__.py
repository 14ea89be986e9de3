"""SGLang's room: everything that is specific to SGLang.

    roles.py            which of its functions plays which role in a trace
    adoption.py         hooks that plugins register with SGLang's own registry, woven by ours
    operator_targets.py, operators.py, layers.py
                        operator dispatch in its fused layers
    communicator.py     a vendor's communicator in its groups
    plugin.py           activates all of that where it is asked for
    platform_bridge.py  a platform of ours in SGLang; cpu_platform.py: on the CPU
    multimodal.py       a multimodal platform of ours in SGLang's image and video engine
    conformance.py      what the conformance kit checks in SGLang; conformance_child.py: in there
    device.py           the device SGLang runs on, as a platform of ours

Importing this package imports nothing of the engine.
"""
