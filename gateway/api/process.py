"""Paths about the gateway itself: models, health, readiness, version, metrics."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.call import Gateway, json_response
from gateway.api.errors import unavailable, unknown_model

OWNER = "stageline"


async def health(gateway: Gateway, request: Request) -> Response:
    """Answer as long as the process runs."""
    return json_response({"status": "ok"})


async def ready(gateway: Gateway, request: Request) -> Response:
    """Answer 200 if requests are served: the coordinator serves, and the gateway does not drain."""
    if gateway.is_draining:
        raise unavailable("the gateway is draining")
    if not gateway.upstream.is_ready:
        raise unavailable(gateway.upstream.problem)
    if gateway.is_waiting:  # it reads the tokenizer
        raise unavailable(gateway.waiting_problem)
    return json_response({"status": "ready"})


async def version(gateway: Gateway, request: Request) -> Response:
    """Return the version of the gateway."""
    return json_response({"version": gateway.config.telemetry.service_version})


async def metrics(gateway: Gateway, request: Request) -> Response:
    """Return the metrics of the gateway, for Prometheus."""
    gateway.visitor.check_watcher("/metrics")
    body, content_type = await gateway.metrics.text(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


async def models(gateway: Gateway, request: Request) -> Response:
    """List the model under all of its names."""
    return json_response(
        {
            "object": "list",
            "data": [_entry(gateway, name) for name in gateway.names if gateway.visitor.may_use(name)],
        }
    )


async def model(gateway: Gateway, request: Request) -> Response:
    """Describe the model of one name."""
    name = request.path_params["model"]
    if name not in gateway.names:
        raise unknown_model(name, gateway.names[0])
    gateway.visitor.check_model(name)
    return json_response(_entry(gateway, name))


def _entry(gateway: Gateway, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": gateway.started,
        "owned_by": OWNER,
        "root": gateway.upstream.model.name,
        "parent": None,
        "max_model_len": gateway.max_model_len,
        "stageline": {
            "has_chat_template": gateway.has_chat_template,
            "dashboard_url": gateway.config.dashboard_url,
        },
    }
