import pytest

from mha_jax.data import text
from tests.data import text_set


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """(folder of the dataset, cache folder)"""
    tmp = tmp_path_factory.mktemp("text")
    return text_set.prepared(tmp, text_set.TRAIN, text_set.VALIDATION), tmp / "cache"


@pytest.fixture(scope="session")
def data(dataset):
    return text.open_text(text_set.config(*dataset), seed=0)
