"""GGUF: llama.cpp's models, its tokenizers, and the file that holds a model and its tokenizer."""
