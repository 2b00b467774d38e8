"""Contents of the next step: sequences, queue, KV ledger, steps in flight. Pure."""
