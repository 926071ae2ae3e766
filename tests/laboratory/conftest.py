import pytest

from tests.laboratory import small


@pytest.fixture(scope="module", autouse=True)
def surroundings():
    with small.surroundings():
        yield
