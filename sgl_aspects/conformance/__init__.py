"""The conformance kit: checks that a platform does what its methods declare.

It runs the embedded runtime's operators, pools, attention backends and engine on the platform. The command
``sgl-aspects conformance`` prints what it finds.

    check.py          the definition of a check, and how it passes, fails or is skipped
    suite.py          runs the checks
    identity.py       names, classes, devices        operations.py   copies, streams, seeds
    memory.py         against real allocations        events.py       against the host's clock
    operators.py      against float64                 kv_pools.py     pages, slots, the allocator
    attention.py      over ragged batches             graphs.py       capture and replay
    capabilities.py   what a platform declares        distributed.py  two processes
    generation.py     a whole model, against transformers or float64: tiny_model.py
"""

from __future__ import annotations

from sgl_aspects.conformance.check import CHECKS, Bench, Check, Result
from sgl_aspects.conformance.suite import GROUPS, run_checks, selected_checks

__all__ = ["CHECKS", "GROUPS", "Bench", "Check", "Result", "run_checks", "selected_checks"]
