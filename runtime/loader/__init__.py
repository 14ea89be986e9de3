"""Checkpoints: configuration, tokenizer and weights, from a Hugging Face folder or GGUF.

model_config.py    ModelConfig: the numbers that the model classes need; the classes, by architecture
checkpoint.py      open_checkpoint(path): detects the kind of checkpoint
hf_config.py       ModelConfig from config.json
hf_folder.py       config.json, *.safetensors, tokenizer.json, chat template, generation_config.json
gguf_file.py       all of that from one GGUF file
gguf_reader.py     the file format
gguf_tokenizer.py  its tokenizer
tokenizer.py       Tokenizer: text to tokens and back, and the chat template
weights.py         fills a model's parameters
"""
