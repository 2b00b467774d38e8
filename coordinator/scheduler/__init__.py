"""What the next step computes: sequences, queue, KV ledger, steps in flight. Pure."""
