"""Tokenizer, detokenizer, stop strings and structured output; independent of the coordinator."""
