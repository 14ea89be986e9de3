"""RankLinks: the rank of one scheduler process, and its pipes to the others.

With tensor parallelism each rank has a process, and each process a whole Scheduler that makes the same
decisions:

    owner ──► rank 0 ──► rank 1       messages: rank 0 passes on what it gets, before each step
              rank 0 ◄─► rank 1       tensors: the communicator, in the model and for the sampled tokens
    owner ◄── rank 0                  outputs and answers; the others send nothing but their last error
"""

from __future__ import annotations

from dataclasses import dataclass, field
from multiprocessing.connection import Connection


@dataclass
class RankLinks:
    rank: int = 0
    world_size: int = 1
    #: Where the communicator's ranks meet.
    init_method: str = ""
    #: Of rank 0: to each of the others. Of another rank: the one from rank 0.
    peers: list[Connection] = field(default_factory=list)
