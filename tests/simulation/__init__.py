"""A whole cluster in one thread, on a clock that nobody waits for and a network that does what a seed says.

Everything between the gRPC calls is the product: coordinator, workers, stages, clients' calls. What is played:
the event loop and its clock (`virtual_loop`), gRPC (`network`, `calls`), and the numbers that a stage computes
(`stage_compute`, which knows the right tokens).
"""
