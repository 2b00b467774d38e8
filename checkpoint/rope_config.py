"""Rotary position embedding in config.json, in both formats of transformers.

transformers 4: `rope_theta` at the top level and `rope_scaling`, whose kind is `rope_type` or `type`.
transformers 5: everything in `rope_parameters`. stage_worker/model/rope.py has the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from checkpoint.config_fields import RawConfig, flag, is_neutral, optional_float, positive_float, positive_int
from checkpoint.errors import BadConfig, UnsupportedModel


class RopeKind(Enum):
    """Scaling of the rotary frequencies; the value is the name in config.json."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of the rotary embedding; those that a kind does not use keep their defaults.

    `factor` belongs to LINEAR, LLAMA3 and YARN; `low_freq_factor` and `high_freq_factor` to LLAMA3;
    `original_max_position_embeddings` (tokens) to LLAMA3 and YARN; the rest to YARN.
    """

    kind: RopeKind = RopeKind.DEFAULT
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


_COMMON_KEYS = frozenset({"rope_theta", "rope_type", "type", "finetuned"})
"""`finetuned` describes the training of the weights; the formula is the same."""

_KIND_KEYS = {
    RopeKind.DEFAULT: frozenset[str](),
    RopeKind.LINEAR: frozenset({"factor"}),
    RopeKind.LLAMA3: frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    RopeKind.YARN: frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}


def parse_rope(raw: RawConfig) -> RopeConfig:
    """Parse the RopeConfig from a whole config.json.

    Raises UnsupportedModel for an unsupported kind or parameter, BadConfig for impossible or contradictory
    values.
    """
    field, parameters = _rope_object(raw)
    kind = _parse_kind(field, parameters)
    _refuse_unknown_parameters(field, parameters, kind)
    theta = _parse_theta(raw, field, parameters)
    max_positions = positive_int(raw, "max_position_embeddings")
    match kind:
        case RopeKind.DEFAULT:
            return RopeConfig(theta=theta)
        case RopeKind.LINEAR:
            return RopeConfig(kind=kind, theta=theta, factor=positive_float(parameters, "factor"))
        case RopeKind.LLAMA3:
            return _parse_llama3(parameters, theta, max_positions)
        case RopeKind.YARN:
            return _parse_yarn(parameters, theta, max_positions)


def _rope_object(raw: RawConfig) -> tuple[str, RawConfig]:
    given = {key: raw[key] for key in ("rope_scaling", "rope_parameters") if raw.get(key)}
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise BadConfig("config fields 'rope_scaling' and 'rope_parameters' contradict each other")
    for field, value in given.items():
        if not isinstance(value, dict):
            raise BadConfig(f"config field {field!r} must be an object, is {value!r}")
        return field, value
    return "rope_scaling", {}


def _parse_kind(field: str, parameters: RawConfig) -> RopeKind:
    names = {str(parameters[key]) for key in ("rope_type", "type") if parameters.get(key) is not None}
    if len(names) > 1:
        raise BadConfig(f"config field {field!r} names two kinds: {', '.join(sorted(names))}")
    name = names.pop() if names else "default"
    if name in ("dynamic", "longrope", "su"):
        raise UnsupportedModel(
            f"config field '{field}.rope_type' = {name!r} is not supported: it changes keys with the total"
            " length of the sequence, so cached keys would be wrong"
        )
    try:
        return RopeKind(name)
    except ValueError:
        legal = ", ".join(kind.value for kind in RopeKind)
        message = f"config field '{field}.rope_type' = {name!r} is not supported (supported: {legal})"
        raise UnsupportedModel(message) from None


def _refuse_unknown_parameters(field: str, parameters: RawConfig, kind: RopeKind) -> None:
    known = _COMMON_KEYS | _KIND_KEYS[kind]
    for key, value in parameters.items():
        if key in known or is_neutral(key, value) or (key == "factor" and value == 1.0):
            continue
        raise UnsupportedModel(
            f"config field '{field}.{key}' = {value!r} is not supported for {kind.value!r}"
        )


def _parse_theta(raw: RawConfig, field: str, parameters: RawConfig) -> float:
    """Return the base of the frequencies; 10000 by default, as in transformers."""
    top, inner = optional_float(raw, "rope_theta"), optional_float(parameters, "rope_theta")
    if top is not None and inner is not None and top != inner:
        raise BadConfig(f"config fields 'rope_theta' = {top} and '{field}.rope_theta' = {inner} contradict")
    return inner or top or 10_000.0


def _parse_llama3(parameters: RawConfig, theta: float, max_positions: int) -> RopeConfig:
    low, high = (positive_float(parameters, f"{side}_freq_factor") for side in ("low", "high"))
    if low >= high:
        raise BadConfig(f"rope low_freq_factor {low} must be below high_freq_factor {high}")
    return RopeConfig(
        kind=RopeKind.LLAMA3,
        theta=theta,
        factor=positive_float(parameters, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_original_length(parameters, max_positions),
    )


def _parse_yarn(parameters: RawConfig, theta: float, max_positions: int) -> RopeConfig:
    beta_fast = positive_float(parameters, "beta_fast", 32.0)
    beta_slow = positive_float(parameters, "beta_slow", 1.0)
    if beta_slow > beta_fast:
        raise BadConfig(f"rope beta_slow {beta_slow} must not be above beta_fast {beta_fast}")
    return RopeConfig(
        kind=RopeKind.YARN,
        theta=theta,
        factor=positive_float(parameters, "factor"),
        original_max_position_embeddings=_original_length(parameters, max_positions),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=optional_float(parameters, "attention_factor"),
        mscale=_mscale(parameters, "mscale"),
        mscale_all_dim=_mscale(parameters, "mscale_all_dim"),
        truncate=flag(parameters, "truncate", default=True),
    )


def _original_length(parameters: RawConfig, max_positions: int) -> int:
    return positive_int(parameters, "original_max_position_embeddings", max_positions)


def _mscale(parameters: RawConfig, key: str) -> float | None:
    """Treat 0 and null as missing, as in transformers."""
    return optional_float(parameters, key) if parameters.get(key) else None
