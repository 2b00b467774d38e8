"""Batches of requests to a gateway: files in and out in OpenAI's form."""
