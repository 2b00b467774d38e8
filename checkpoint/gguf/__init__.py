"""Reads GGUF files, llama.cpp's format: as config, tensors and tokenizer of a Hugging Face checkpoint."""
