"""Who may use a gateway: limits of API keys, and whose requests they make."""
