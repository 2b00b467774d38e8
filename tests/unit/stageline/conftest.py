import pytest

from tests import ports


@pytest.fixture
def unused_address() -> str:
    """A local address without a listener."""
    return ports.unused_address()
