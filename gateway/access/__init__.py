"""Who may use a gateway: API keys, their limits, and whose requests they make."""
