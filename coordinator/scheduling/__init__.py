"""What the next step computes: sequences, queue, ledger, steps in flight. Pure."""
