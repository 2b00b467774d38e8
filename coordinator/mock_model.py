"""A model without weights, for clusters of mock stages."""

from checkpoint import Attention, Blueprint, Dense, DType, LayerPlan, Norm, RopeConfig
from checkpoint.config_fields import MAX_LAYERS
from wire.foreign_text import parse_digits

NAME = "mock"

_DEFAULTS = {
    "layers": 0,
    "hidden": 1024,
    "ffn": 4096,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 64,
    "vocab": 32_000,
    "max_len": 4096,
}
_MOST = 1 << 20


def parse_mock_model(text: str) -> Blueprint:
    """The shape that "layers=64,hidden=1024,..." describes; only layers has no default.

    Raises ValueError that names the wrong setting.
    """
    sizes = dict[str, int]()
    for part in text.split(","):
        name, separator, value = part.strip().partition("=")
        if name not in _DEFAULTS or not separator:
            raise ValueError(f"mock model {part!r}: expected {', '.join(f'{name}=N' for name in _DEFAULTS)}")
        if name in sizes:
            raise ValueError(f"mock model {name!r} is given twice")
        sizes[name] = _parse_size(name, value.strip())
    if "layers" not in sizes:
        raise ValueError(f"mock model {text!r} has no number of layers: add layers=N")
    return _config({**_DEFAULTS, **sizes})


def mock_fingerprint(config: Blueprint) -> str:
    """The identity of a mock model: its shape."""
    mixer, dense = config.layers[0].mixer, config.layers[0].feed_forward
    assert isinstance(dense, Dense) and isinstance(mixer, Attention), "a mock model of another family"
    sizes = (config.num_layers, config.hidden_size, dense.width, mixer.num_heads)
    others = (mixer.num_kv_heads, mixer.head_dim, config.vocab_size, config.max_position_embeddings)
    return "mock-" + "-".join(map(str, (*sizes, *others)))


def _parse_size(name: str, text: str) -> int:
    limit = MAX_LAYERS if name == "layers" else _MOST
    if not (size := parse_digits(text, limit=limit)):
        raise ValueError(f"mock model {name}={text!r}: expected a number from 1 to {limit}")
    return size


def _config(sizes: dict[str, int]) -> Blueprint:
    norm = Norm(eps=1e-5)
    attention = Attention(
        num_heads=sizes["heads"],
        num_kv_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        rope=RopeConfig(),
        scale=sizes["head_dim"] ** -0.5,
    )
    layer = LayerPlan(mixer=attention, feed_forward=Dense(width=sizes["ffn"]), norm=norm)
    return Blueprint(
        model_type="llama",
        hidden_size=sizes["hidden"],
        vocab_size=sizes["vocab"],
        max_position_embeddings=sizes["max_len"],
        layers=(layer,) * sizes["layers"],
        final_norm=norm,
        tie_word_embeddings=False,
        dtype=DType.BF16,
        legal_cuts=frozenset(range(1, sizes["layers"])),
    )
