"""A vendor's platform class and its classes in real SGLang.

platform.py      the platform class, under the method names of SGLang's version
server_args.py   SGLang's settings, of which it sets those that the user left open
kv_cache.py      its pools and allocator
attention.py     its attention backends
quantization.py  its quantization methods
multimodal.py    the platform class of the engine for images and video
"""
