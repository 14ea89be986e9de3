"""A traced engine answers three prompts; the trace becomes a page to look at.

    python examples/quickstart.py path/to/model [report.html]

`path/to/model` is a Hugging Face folder or a GGUF file of a Llama model.
"""

import sys
from pathlib import Path

from sgl_aspects.cli.main import main as sgl_aspects
from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.tracing import attach

PROMPTS = ["The capital of France is", "Three fruits are", "A good night's sleep needs"]


def main(model: str, page: str = "report.html") -> None:
    spans = str(Path(page).with_suffix(".jsonl"))
    # Attached before the engine starts its scheduler process: that one is traced, too.
    with attach(level=3, file=spans) as session, Engine(model_path=model) as engine:
        sampling = SamplingParams(max_new_tokens=16, temperature=0.0)
        for handle in [engine.submit(prompt, sampling) for prompt in PROMPTS]:
            print(repr("".join(chunk.text for chunk in handle)))
    print(session.summary)
    sgl_aspects(["report", spans, "-o", page])


if __name__ == "__main__":  # the scheduler process imports this file
    main(*sys.argv[1:])
