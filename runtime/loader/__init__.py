"""Checkpoints: configuration, tokenizer and weights, from a Hugging Face folder or GGUF.

model_config.py       ModelConfig: the numbers that the model classes need checkpoint.py
open_checkpoint(path): detects which of the two it is hf_config.py          ModelConfig from config.json
hf_folder.py          config.json, *.safetensors, tokenizer.json, chat template, generation_config.json
gguf_file.py          all of that rebuilt from one GGUF file gguf_reader.py        the file format
gguf_tokenizer.py     its tokenizer quantization.py       linears in 8 bits, as an option
"""
