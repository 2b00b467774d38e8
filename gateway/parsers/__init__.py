"""Parsers of answers: reasoning and tool calls out of text, and grammars that force tool calls. Pure."""
