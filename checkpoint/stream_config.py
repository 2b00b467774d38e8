"""Several residual streams in config.json."""

from __future__ import annotations

from checkpoint.config_fields import RawConfig, positive_float, positive_int
from checkpoint.family_rules import Streams
from checkpoint.streams import HyperConnection, WeightedCollapse


def parse_connection(raw: RawConfig, streams: Streams, norm_eps: float) -> HyperConnection:
    """The connections of a layer, whose norms have `norm_eps`. Raises BadConfig."""
    num_streams, eps = positive_int(raw, "hc_mult"), positive_float(raw, "hc_eps")
    if streams is Streams.BALANCED:
        rounds = positive_int(raw, "hc_sinkhorn_iters")
        return HyperConnection(num_streams=num_streams, norm_eps=norm_eps, gate_eps=eps, mixing_rounds=rounds)
    return HyperConnection(
        num_streams=num_streams,
        norm_eps=norm_eps,
        gate_eps=eps,
        magnitude=positive_float(raw, "hc_magnitude"),
        write_eps=eps,
    )


def parse_collapse(raw: RawConfig, norm_eps: float) -> WeightedCollapse:
    """The end of the streams. Raises BadConfig."""
    return WeightedCollapse(
        num_streams=positive_int(raw, "hc_mult"), norm_eps=norm_eps, gate_eps=positive_float(raw, "hc_eps")
    )
