#!/bin/sh
# Real SGLang, traced, not edited: every request, scheduler step and forward pass, in all its processes.
#
#     examples/trace_sglang.sh path/to/model spans.jsonl
#
# Then send it a request, watch it with `sgl-aspects top`, stop it with Ctrl-C, and look at
# `sgl-aspects report spans.jsonl`. More arguments go to SGLang: on a plain CPU, --device cpu.
model=$1 spans=$2
shift 2
exec sgl-aspects run --level 3 --file "$spans" -- python -m sglang.launch_server --model-path "$model" "$@"
