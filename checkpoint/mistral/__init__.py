"""Reads checkpoints in Mistral's own format: params.json, consolidated*.safetensors and tekken.json."""
