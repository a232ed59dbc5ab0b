"""GGUF: llama.cpp's models, its tokenizers, and the file that holds both."""
