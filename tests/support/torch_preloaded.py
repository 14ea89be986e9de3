"""Imported by the process that schedulers are forked from; see forked_schedulers."""

import gc

import torch  # noqa: F401

gc.freeze()  # or each of its children would search torch's heap for garbage
