"""Several residual streams in config.json."""

from __future__ import annotations

from checkpoint.config_fields import RawConfig, positive_float, positive_int
from checkpoint.errors import UnsupportedModel
from checkpoint.family_rules import Streams
from checkpoint.streams import GatedCollapse, GatedConnection, HyperConnection, WeightedCollapse

Connection = HyperConnection | GatedConnection
Collapse = WeightedCollapse | GatedCollapse


def parse_connection(raw: RawConfig, streams: Streams, norm_eps: float) -> Connection:
    """The connections of a layer, whose norms have `norm_eps`.

    Raises BadConfig, and UnsupportedModel for a single gated stream.
    """
    if streams is Streams.GATED:
        return GatedConnection(num_streams=_gated(raw), rank=_rank(raw), norm_eps=norm_eps)
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


def parse_collapse(raw: RawConfig, rule: Streams, norm_eps: float) -> Collapse:
    """The end of the streams. Raises like `parse_connection`."""
    if rule is Streams.GATED:
        return GatedCollapse(num_streams=_gated(raw), rank=_rank(raw), norm_eps=norm_eps)
    return WeightedCollapse(
        num_streams=positive_int(raw, "hc_mult"), norm_eps=norm_eps, gate_eps=positive_float(raw, "hc_eps")
    )


def _gated(raw: RawConfig) -> int:
    """Number of gated streams."""
    if (num_streams := positive_int(raw, "hc_count", 4)) < 2:
        raise UnsupportedModel(f"config field 'hc_count' = {num_streams} is not supported, the minimum is 2")
    return num_streams


def _rank(raw: RawConfig) -> int:
    return positive_int(raw, "hc_lowrank", 320)
