"""Simulates a whole cluster in one thread, with virtual time and a network driven by a seed.

Coordinator, workers, stages and client calls are the product's code. Simulated are the event loop and its
clock (`virtual_loop`), gRPC (`network`, `calls`) and the computation of stages (`stage_compute`, which knows
the right tokens). `faults` injects faults, `oracle` and `customers` check invariants, `coverage` lists the
decisions that must occur, `planted` the bugs that must be found. `gateway_schedule` adds `gateways`, their
clients and a journal; `planted_gateways` has the bugs that its schedules must find.
"""
