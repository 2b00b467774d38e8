"""A Ray cluster of a head and two nodes on this machine: prints its address, and removes nodes that it reads.

A process of its own, because Ray changes handlers and warnings of the one that imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ray.cluster_utils import Cluster

NUM_TRIES = 5
STORE = {"object_store_memory": 80 * 2**20}


def started(start: Callable[[], Any]) -> Any:
    """A node. Ray gives it 30 s, which a busy machine may exceed."""
    for _ in range(NUM_TRIES - 1):
        try:
            return start()
        except Exception as error:
            print(f"starting a node again: {error}", file=sys.stderr)
    return start()


def main() -> None:
    """Until the standard input ends."""
    head: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False, **STORE}
    cluster = Cluster()
    started(lambda: cluster.add_node(**head))
    try:
        nodes = [started(lambda: cluster.add_node(num_cpus=2, **STORE)) for _ in range(2)]
        print(cluster.address, flush=True)
        for line in sys.stdin:
            wanted = line.strip()
            (node,) = [node for node in nodes if node.node_id.startswith(wanted)]
            cluster.remove_node(node, allow_graceful=False)
            print(f"removed {wanted}", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
