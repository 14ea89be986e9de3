"""A program without any tracing code. aspects.toml, beside it, names two of its functions.

sgl-aspects run --config aspects.toml --file spans.jsonl -- python -c "import program; program.main()"
"""

import time


class Store:
    def __init__(self):
        self.rows = {"a": 1}

    def look_up(self, key):
        time.sleep(0.01)
        return self.rows.get(key, 0)


def answer(store, keys):
    return [store.look_up(key) for key in keys]


def main():
    print(answer(Store(), ["a", "b"]))
