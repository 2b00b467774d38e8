"""Shows how far a local cluster is on its way to serving."""

from rich.console import Console
from rich.markup import escape

from deploy import LocalCluster
from stageline.cli.tables import describe_start
from stageline_rpc.v1 import cluster_pb2


async def wait_until_serving(
    cluster: LocalCluster, console: Console, *, timeout_s: float
) -> cluster_pb2.GetStatusResponse:
    """Returns the status once the cluster serves, with a line that moves until then. Raises ClusterFailed."""
    with console.status("Waiting for the workers") as line:
        return await cluster.wait_until_serving(
            timeout_s=timeout_s, on_status=lambda status: line.update(escape(describe_start(status)))
        )
