"""The cost of tracing for a real vLLM server on the CPU (in .vllm-venv), measured as SGLang's is:

    python -m benchmarks.vllm_overhead [--minutes 4] [--model FOLDER] [--sizes 1 16] [--subjects 2 3]

vLLM's own tracing is decided when a server starts, and two servers of the same settings differ by more.
"""

from benchmarks.sglang_overhead import main

if __name__ == "__main__":
    main("vllm")
