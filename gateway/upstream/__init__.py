"""The coordinator, as a gateway sees it."""
