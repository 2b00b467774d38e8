"""The coordinator: plans, admits, schedules, keeps the ledger, and speaks with clients and workers."""
