"""How many examples property tests try: the tier chooses a profile, a test its weight."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

EXAMPLES = {"quick": 24, "full": 72, "nightly": 2000}
"""Examples of a test of weight 1, by profile: `pytest --hypothesis-profile full`."""


def register_profiles() -> None:
    """Register all profiles and load `quick`, which pytest's option overrides.

    Speed is not checked: tests run in parallel, on machines of any speed.
    """
    for name, num_examples in EXAMPLES.items():
        settings.register_profile(
            name, max_examples=num_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
    settings.load_profile("quick")


def examples(weight: float) -> int:
    """Number of examples for a test that needs `weight` times as many as others."""
    return round(weight * settings().max_examples)
