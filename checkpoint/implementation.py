"""Which code computes the layers of a stage, by a user's choice and by what a model needs."""

from __future__ import annotations

from enum import Enum

from checkpoint.blueprint import Blueprint
from checkpoint.errors import UnsupportedModel


class Implementation(Enum):
    """Which code computes the layers of a stage."""

    NATIVE = "native"
    TRANSFORMERS = "transformers"

    @classmethod
    def choose(cls, name: str, config: Blueprint) -> Implementation:
        """The implementation of a user's choice; "auto" is native code for families that have it.

        Raises ValueError for an unknown name, UnsupportedModel for a model that it cannot compute.
        """
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"implementation {name!r} is not one of {', '.join(IMPLEMENTATIONS)}")
        if name == cls.NATIVE.value and not config.has_row:
            raise UnsupportedModel(
                f"{config.model_type!r} has no native layers: use --implementation transformers, or auto"
            )
        if name == cls.TRANSFORMERS.value and config.is_recurrent:
            raise UnsupportedModel(
                f"{config.model_type!r} has recurrent states, which transformers' layers keep in caches of"
                " their own: use --implementation native, or auto"
            )
        if name == cls.TRANSFORMERS.value and config.num_streams > 1:
            raise UnsupportedModel(
                f"{config.model_type!r} has {config.num_streams} residual streams, which transformers' layers"
                " take in another form: use --implementation native, or auto"
            )
        is_native = name == cls.NATIVE.value or (name == AUTO and config.has_row)
        return cls.NATIVE if is_native else cls.TRANSFORMERS


AUTO = "auto"
IMPLEMENTATIONS = (AUTO, *(one.value for one in Implementation))
"""Names for users."""
