"""Text to token ids and back; structured output."""
