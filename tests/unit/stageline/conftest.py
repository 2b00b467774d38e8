import pytest

from tests import ports


@pytest.fixture
def unused_address() -> str:
    """An address of this machine where nobody listens."""
    return ports.unused_address()
