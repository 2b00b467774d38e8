"""The role of a stage. The plan assigns it; nothing else may infer it."""

from enum import Enum


class StageRole(Enum):
    """What a stage does besides running its layers."""

    FIRST = "FIRST"
    MIDDLE = "MIDDLE"
    LAST = "LAST"
    ONLY = "ONLY"

    @property
    def has_embeddings(self) -> bool:
        """Tokens enter here; there are no hidden states in its frames."""
        return self in (StageRole.FIRST, StageRole.ONLY)

    @property
    def has_head(self) -> bool:
        """Final norm, output head and sampling are here; it answers every frame."""
        return self in (StageRole.LAST, StageRole.ONLY)

    @classmethod
    def of_stage(cls, stage: int, num_stages: int) -> "StageRole":
        """The role of stage `stage` of `num_stages`. Raises ValueError when there is no such stage."""
        if not 0 <= stage < num_stages:
            raise ValueError(f"stage {stage} of a plan with {num_stages} stages")
        if num_stages == 1:
            return cls.ONLY
        if stage == 0:
            return cls.FIRST
        return cls.LAST if stage == num_stages - 1 else cls.MIDDLE
