"""Replacing a class of the engine, wherever its name was copied to.

Prints:

    FIFO took: [1, 2, 3]
    Shortest first took: [3, 1, 2]
    an instance of it is still a Queue: True
    FIFO took: [1, 2, 3]
"""

import sys
import types

import sgl_aspects as aspects

# An engine, as two modules: one defines the class, the other has copied its name.
engine = types.ModuleType("engine")
exec(
    """
class Queue:
    label = "FIFO"
    def __init__(self): self.requests = []
    def add(self, request): self.requests.append(request)
    def take(self): return self.requests.pop(0)
""",
    engine.__dict__,
)
sys.modules["engine"] = engine
server = types.ModuleType("server")
exec(
    """
from engine import Queue
def serve(requests):
    queue = Queue()
    for request in requests: queue.add(request)
    return queue, [queue.take()[0] for _ in requests]
""",
    server.__dict__,
)
sys.modules["server"] = server


def main() -> None:
    requests = [(1, 500), (2, 700), (3, 20)]  # (id, prompt tokens)
    queue, taken = server.serve(requests)
    print(f"{queue.label} took: {taken}")

    @aspects.replace("engine:Queue")
    class ShortestFirst(engine.Queue):
        label = "Shortest first"

        def take(self):
            shortest = min(self.requests, key=lambda request: request[1])
            self.requests.remove(shortest)
            return shortest

    with aspects.woven(ShortestFirst):
        queue, taken = server.serve(requests)
        print(f"{queue.label} took: {taken}")
        print("an instance of it is still a Queue:", isinstance(queue, engine.Queue))
    queue, taken = server.serve(requests)
    print(f"{queue.label} took: {taken}")


main()
