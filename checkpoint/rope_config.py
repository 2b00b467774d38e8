"""Rotary position embedding in config.json, in both formats of transformers.

transformers 4: `rope_theta` at the top level and `rope_scaling`, whose kind is `rope_type` or `type`.
transformers 5: everything in `rope_parameters`. stage_worker/model/rope.py has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from checkpoint.config_fields import (
    MAX_INT,
    RawConfig,
    flag,
    is_neutral,
    optional_float,
    positive_float,
    positive_floats,
    positive_int,
    shown,
)
from checkpoint.errors import BadConfig, UnsupportedModel


class RopeKind(Enum):
    """Scaling of the rotary frequencies; the value is the name in config.json."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of the rotary embedding; parameters that a kind does not use keep their defaults.

    `width` is the number of leading elements of a head that are rotated; None for all. Element 2 i is
    paired with 2 i + 1 if interleaved, else i with i + width / 2. PROPORTIONAL pairs i with i + head_dim / 2
    and rotates the first width / 2 pairs, by the angles that they have if all pairs are rotated.

    `factor` belongs to LINEAR, LLAMA3, YARN and PROPORTIONAL; `low_freq_factor` and `high_freq_factor` to
    LLAMA3; `original_max_position_embeddings` (tokens) to LLAMA3, YARN and LONGROPE; `short_factors`, and
    `long_factors` if `is_long`, one per frequency, to LONGROPE; `attention_factor` to YARN and LONGROPE; the
    rest to YARN.
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
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False
    width: int | None = None
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor(p / original_length)).

    Source: Llama 4's attention temperature; transformers get_llama_4_attn_scale.
    """

    beta: float
    original_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRule:
    """How a family reads its rotary embedding.

    `theta` is the default base, `local_theta` the one of windowed layers if it differs. `partial` is the
    default of partial_rotary_factor; None: not read. With `is_per_type`, rope_parameters has an object for
    each layer type, and the fields of transformers 4 scale layers without a window only.
    `has_length_factors`: "longrope" is served. `has_fixed_alpha`: "dynamic" with `alpha` is a larger base.
    `has_proportional`: "proportional" is served, by default in layers with full attention, which rotate a
    quarter of each head. `has_query_growth`: llama_4_scaling_beta is read. Field `rotary_dim_key`, in
    elements, is the default instead of `partial`. `has_sections`: parts of a head have positions of their own
    in images; a token of a text has one position, so they change nothing. `default` is the object of a config
    without any.
    """

    theta: float = 10_000.0
    local_theta: float | None = None
    partial: float | None = None
    is_interleaved: bool = False
    is_per_type: bool = False
    has_length_factors: bool = False
    has_fixed_alpha: bool = False
    has_proportional: bool = False
    has_query_growth: bool = False
    rotary_dim_key: str | None = None
    has_sections: bool = False
    default: Mapping[str, object] | None = field(default=None, hash=False)


FULL, SLIDING = "full_attention", "sliding_attention"
"""Layer types in config.json."""

_COMMON_KEYS = frozenset({"rope_theta", "rope_type", "type", "finetuned"})
"""`finetuned` describes the training of the weights; the formula is the same."""

_KIND_KEYS = {
    RopeKind.DEFAULT: frozenset({"original_max_position_embeddings"}),
    RopeKind.LINEAR: frozenset({"factor", "original_max_position_embeddings"}),
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
    RopeKind.LONGROPE: frozenset(
        {"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"}
    ),
    RopeKind.PROPORTIONAL: frozenset({"factor", "partial_rotary_factor"}),
}
_REMEDIES = {
    "attn_factor": ": transformers does not read it, and vLLM multiplies the attention factor by it; leave it"
    " out for the tokens of transformers, or set 'attention_factor' to attn_factor * (0.1 * ln(factor) + 1)"
    " for those of vLLM"
}
_FIXED_ALPHA_KEYS = frozenset({"alpha", "beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim"})
"""Of these transformers reads `alpha` only."""


_PROPORTIONAL_DEFAULT = {FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25}, SLIDING: {}}
"""Source: transformers' Gemma4TextConfig."""


def parse_ropes(raw: RawConfig, rule: RopeRule, head_dims: Mapping[str, int]) -> dict[str, RopeConfig]:
    """Parse the RopeConfig of each layer type from a whole config.json, for heads of `head_dims` elements.

    Raises UnsupportedModel for an unsupported kind or parameter, BadConfig for impossible or contradictory
    values.
    """
    field, given = _rope_object(raw, rule)
    if rule.has_proportional and not given:
        given = _PROPORTIONAL_DEFAULT
    if not rule.is_per_type:
        rope = _RopeReader(raw, rule, head_dims[FULL], field, given).read(rule.theta)
        return {FULL: rope, SLIDING: rope}
    if not given.keys() & {FULL, SLIDING}:
        return _ropes_of_transformers_4(raw, rule, head_dims[FULL], field, given)
    if unknown := given.keys() - {FULL, SLIDING}:
        raise UnsupportedModel(f"config field '{field}.{min(unknown)}' is not a layer type")
    ropes = {}
    for layer_type, theta in ((FULL, rule.theta), (SLIDING, rule.local_theta or rule.theta)):
        name, parameters = f"{field}.{layer_type}", given.get(layer_type) or {}
        if not isinstance(parameters, dict):
            raise BadConfig(f"config field {name!r} must be an object, is {parameters!r}")
        ropes[layer_type] = _RopeReader({}, rule, head_dims[layer_type], name, parameters).read(theta, raw)
    return ropes


def _ropes_of_transformers_4(
    raw: RawConfig, rule: RopeRule, head_dim: int, field: str, given: RawConfig
) -> dict[str, RopeConfig]:
    local = {} if rule.local_theta is None else {"rope_theta": raw.get("rope_local_base_freq")}
    sliding = _RopeReader(local if local else raw, rule, head_dim, field, {})
    return {
        FULL: _RopeReader(raw, rule, head_dim, field, given).read(rule.theta),
        SLIDING: sliding.read(rule.local_theta or rule.theta, raw),
    }


_SCALED = {kind.value for kind in (RopeKind.LINEAR, RopeKind.LLAMA3, RopeKind.YARN, RopeKind.LONGROPE)}


def scaled_length(raw: RawConfig, *, is_counted: bool = False) -> int:
    """The longest sequence of a scaled rotary embedding, factor times the original length.

    0 if it is none, or not longer than max_position_embeddings.

    Configs of published models keep max_position_embeddings when they are scaled, as their model cards say.
    An original length that is missing is max_position_embeddings, unless this counts the scaling
    (`is_counted`).
    """
    found = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        return 0
    usual = longest = positive_int(raw, "max_position_embeddings")
    for given in (found, *(own for own in found.values() if isinstance(own, Mapping))):
        if _with_rope_type(given)["rope_type"] not in _SCALED or given.get("factor") is None:
            continue
        key = "original_max_position_embeddings"
        original = given.get(key) or raw.get(key) or (None if is_counted else usual)
        if original is not None:
            reached = positive_float(given, "factor") * positive_int({key: original}, key)
            longest = max(longest, int(min(reached, MAX_INT)))
    return longest if longest > usual else 0


def parse_query_growth(raw: RawConfig, rule: RopeRule) -> tuple[float, int] | None:
    """Parse beta and original length of Ministral 3's attention temperature; None without it."""
    if not rule.has_query_growth:
        return None
    _, given = _rope_object(raw, rule)
    if not given.get("llama_4_scaling_beta"):
        return None
    beta = positive_float(given, "llama_4_scaling_beta")
    return beta, positive_int(given, "original_max_position_embeddings")


def _rope_object(raw: RawConfig, rule: RopeRule) -> tuple[str, RawConfig]:
    """The object and its name. Of two, transformers reads rope_scaling alone, so they must agree."""
    found: dict[str, RawConfig] = {}
    for name in ("rope_scaling", "rope_parameters"):
        if value := raw.get(name):
            if not isinstance(value, Mapping):
                raise BadConfig(f"config field {name!r} must be an object, is {value!r}")
            found[name] = value
    if len(found) == 2:
        _refuse_other_rope(raw, rule, found["rope_scaling"], found["rope_parameters"])
    return next(iter(found.items()), ("rope_scaling", rule.default or {}))


_OUTSIDE = ("rope_theta", "partial_rotary_factor")
"""Parameters that transformers 4 wrote beside rope_scaling."""


def _refuse_other_rope(raw: RawConfig, rule: RopeRule, scaling: RawConfig, parameters: RawConfig) -> None:
    """Raise BadConfig if `parameters` give another rotary embedding than `scaling`, or than its defaults."""
    defaults = {"rope_theta": rule.theta, "partial_rotary_factor": rule.partial or 1.0}
    outside = {key: raw[key] for key in _OUTSIDE if raw.get(key) is not None}
    read, unread = (_with_rope_type({**defaults, **outside, **found}) for found in (scaling, parameters))
    for key in sorted(read.keys() | unread.keys()):
        if read.get(key) != unread.get(key):
            raise BadConfig(
                f"config fields 'rope_scaling' and 'rope_parameters' contradict each other: {key!r} is"
                f" {shown(read.get(key))} and {shown(unread.get(key))}"
            )


def _with_rope_type(found: RawConfig) -> RawConfig:
    """Parameters that are not null, with the newer name of the kind."""
    kind = found.get("rope_type") or found.get("type") or "default"
    others = {key: value for key, value in found.items() if value is not None and key != "type"}
    return others | {"rope_type": str(kind)}


@dataclass(frozen=True, slots=True)
class _RopeReader:
    """One object `given` of parameters, which messages call `field`; `top` has the older fields beside it."""

    top: RawConfig
    rule: RopeRule
    head_dim: int
    field: str
    given: RawConfig

    def read(self, default_theta: float, raw: RawConfig | None = None) -> RopeConfig:
        """Parse it; `raw` is the whole config, if `top` is not."""
        kind = self._kind()
        self._refuse_unknown(kind)
        theta = self._theta(default_theta)
        whole = self.top if raw is None else raw
        max_positions = positive_int(whole, "max_position_embeddings")
        rope = _parse_kind(kind, self.given, max_positions, whole)
        if self.rule.has_fixed_alpha and (alpha := optional_float(self.given, "alpha")) is not None:
            theta *= alpha ** (self.head_dim / (self.head_dim - 2))
        width = self._width(kind)
        expected = (width or self.head_dim) // 2
        for key, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
            if factors and len(factors) != expected:
                raise BadConfig(
                    f"config field '{self.field}.{key}' has {len(factors)} numbers, expected {expected}"
                )
        return replace(rope, theta=theta, width=width, is_interleaved=self.rule.is_interleaved)

    def _width(self, kind: RopeKind) -> int | None:
        default = 1.0 if kind is RopeKind.PROPORTIONAL else self.rule.partial
        if default is None:
            return None
        top, inner = (optional_float(source, "partial_rotary_factor") for source in (self.top, self.given))
        if top is not None and inner is not None and top != inner:
            raise BadConfig(
                f"config fields 'partial_rotary_factor' = {top} and '{self.field}.partial_rotary_factor' = "
                f"{inner} contradict"
            )
        factor = inner or top or self._default_partial(default)
        width = int(self.head_dim * factor)
        if factor > 1 or width < 2 or width % 2:
            raise BadConfig(
                f"config field 'partial_rotary_factor' = {factor} rotates {width} of {self.head_dim} "
                "elements of a head, expected an even number"
            )
        return None if width == self.head_dim else width

    def _default_partial(self, partial: float) -> float:
        key = self.rule.rotary_dim_key
        if key is not None and self.top.get(key) is not None:
            return positive_int(self.top, key) / self.head_dim
        return partial

    def _kind(self) -> RopeKind:
        given = self.given
        names = {str(given[key]) for key in ("rope_type", "type") if given.get(key) is not None}
        if len(names) > 1:
            raise BadConfig(f"config field {self.field!r} names two kinds: {', '.join(sorted(names))}")
        name = names.pop() if names else "default"
        if self.rule.has_length_factors and name in ("su", "yarn"):
            name = "longrope"  # as transformers' Phi3Config reads them
        if self.rule.has_fixed_alpha and name == "dynamic" and given.get("alpha"):
            return RopeKind.DEFAULT
        if name == "dynamic" and given.get("factor") == 1.0:
            return RopeKind.DEFAULT  # it grows beyond factor * max_position_embeddings, which is the limit
        is_dynamic = name == "dynamic" or (name in ("longrope", "su") and not self.rule.has_length_factors)
        if is_dynamic:
            raise UnsupportedModel(
                f"config field '{self.field}.rope_type' = {name!r} is not supported: it changes keys with the"
                " total length of the sequence, so cached keys would be wrong"
            )
        kinds = {kind.value: kind for kind in RopeKind}
        if not self.rule.has_proportional:
            del kinds[RopeKind.PROPORTIONAL.value]
        try:
            return kinds[name]
        except KeyError:
            legal = ", ".join(kinds)
            message = (
                f"config field '{self.field}.rope_type' = {name!r} is not supported (supported: {legal})"
            )
            raise UnsupportedModel(message) from None

    def _refuse_unknown(self, kind: RopeKind) -> None:
        known = _COMMON_KEYS | _KIND_KEYS[kind]
        if self.rule.partial is not None:
            known |= {"partial_rotary_factor"}
        if self.rule.has_fixed_alpha and self.given.get("alpha"):
            known |= _FIXED_ALPHA_KEYS
        if self.rule.has_query_growth:
            known |= {"llama_4_scaling_beta", "max_position_embeddings"}
        if self.rule.has_sections:
            known |= {"mrope_section", "mrope_interleaved"}
        for key, value in self.given.items():
            if key in known or is_neutral(key, value) or (key == "factor" and value == 1.0):
                continue
            raise UnsupportedModel(
                f"config field '{self.field}.{key}' = {value!r} is not supported for {kind.value!r}"
                f"{_REMEDIES.get(key, '')}"
            )

    def _theta(self, default: float) -> float:
        top, inner = optional_float(self.top, "rope_theta"), optional_float(self.given, "rope_theta")
        if top is not None and inner is not None and top != inner:
            raise BadConfig(
                f"config fields 'rope_theta' = {top} and '{self.field}.rope_theta' = {inner} contradict"
            )
        return inner or top or default


def _parse_kind(kind: RopeKind, parameters: RawConfig, max_positions: int, raw: RawConfig) -> RopeConfig:
    match kind:
        case RopeKind.DEFAULT:
            return RopeConfig()
        case RopeKind.LINEAR:
            return RopeConfig(kind=kind, factor=positive_float(parameters, "factor"))
        case RopeKind.PROPORTIONAL:
            return RopeConfig(kind=kind, factor=positive_float(parameters, "factor", 1.0))
        case RopeKind.LLAMA3:
            return _parse_llama3(parameters, max_positions)
        case RopeKind.YARN:
            return _parse_yarn(parameters, max_positions)
        case RopeKind.LONGROPE:
            return _parse_longrope(parameters, max_positions, raw)


def _parse_llama3(parameters: RawConfig, max_positions: int) -> RopeConfig:
    low, high = (positive_float(parameters, f"{side}_freq_factor") for side in ("low", "high"))
    if low >= high:
        raise BadConfig(f"rope low_freq_factor {low} must be below high_freq_factor {high}")
    return RopeConfig(
        kind=RopeKind.LLAMA3,
        factor=positive_float(parameters, "factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=_original_length(parameters, max_positions),
    )


def _parse_yarn(parameters: RawConfig, max_positions: int) -> RopeConfig:
    beta_fast = positive_float(parameters, "beta_fast", 32.0)
    beta_slow = positive_float(parameters, "beta_slow", 1.0)
    if beta_slow > beta_fast:
        raise BadConfig(f"rope beta_slow {beta_slow} must not be above beta_fast {beta_fast}")
    return RopeConfig(
        kind=RopeKind.YARN,
        factor=positive_float(parameters, "factor"),
        original_max_position_embeddings=_original_length(parameters, max_positions),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=optional_float(parameters, "attention_factor"),
        mscale=_mscale(parameters, "mscale"),
        mscale_all_dim=_mscale(parameters, "mscale_all_dim"),
        truncate=flag(parameters, "truncate", default=True),
    )


def _parse_longrope(parameters: RawConfig, max_positions: int, raw: RawConfig) -> RopeConfig:
    """Source: Ding et al. 2024, arXiv:2402.13753; transformers _compute_longrope_parameters."""
    source = parameters if parameters.get("original_max_position_embeddings") is not None else raw
    original = positive_int(source, "original_max_position_embeddings", max_positions)
    factor = positive_float(parameters, "factor", max_positions / original)
    found = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        kind=RopeKind.LONGROPE,
        original_max_position_embeddings=original,
        attention_factor=optional_float(parameters, "attention_factor") or found,
        short_factors=positive_floats(parameters, "short_factor"),
        long_factors=positive_floats(parameters, "long_factor"),
    )


def _original_length(parameters: RawConfig, max_positions: int) -> int:
    return positive_int(parameters, "original_max_position_embeddings", max_positions)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Temperature of yarn: 0.1 * mscale * ln(factor) + 1. Source: Peng et al. 2023, section 3.4."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _mscale(parameters: RawConfig, key: str) -> float | None:
    """Treat 0 and null as missing, as in transformers."""
    return optional_float(parameters, key) if parameters.get(key) else None
