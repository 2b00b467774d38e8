"""HTTP APIs of OpenAI over one coordinator: stateless, one process of any number."""
