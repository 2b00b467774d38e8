"""Fixtures for engine tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.coordinator.engine.engine_model import EngineModel

NewModel = Callable[..., EngineModel]


@pytest.fixture
def new_model() -> Iterator[NewModel]:
    """Factory for engines over serving pipelines."""
    made: list[EngineModel] = []

    def make(**options: Any) -> EngineModel:
        made.append(EngineModel(**options))
        return made[-1]

    yield make
    for model in made:
        model.close()
