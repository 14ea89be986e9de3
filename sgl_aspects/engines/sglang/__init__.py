"""SGLang's room: everything that is specific to SGLang.

    roles.py            which of its functions plays which role in a trace
    details.py          the same for level 4
    speculation.py      drafts, and the functions that make them
    diffusion.py        the same for its other engine, which makes images and videos
    adoption.py         weaves the hooks that plugins register with SGLang's own registry
    operator_targets.py, operators.py, layers.py
                        operator dispatch in its fused layers
    communicator.py     a vendor's communicator in its groups
    plugin.py           activates all of that if the environment enables it
    bridge/             a platform class and a vendor's classes in SGLang; cpu_platform.py: on the CPU
    conformance         the checks of the conformance kit; conformance/child.py: inside SGLang

Importing this package imports nothing of the engine.
"""
