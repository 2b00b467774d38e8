"""A whole cluster in one thread, on a clock that nobody waits for and a network that does what a seed says.

Everything between the gRPC calls is the product: coordinator, workers, stages, and the calls of clients. What
is played: the event loop and its clock (`virtual_loop`), gRPC (`network`, `calls`), and what a stage computes
(`stage_compute`, which knows the right tokens). `faults` says what can go wrong, `oracle` and `customers`
what must hold all the same, `coverage` which decisions must be taken, `planted` which bugs must be found.
"""
