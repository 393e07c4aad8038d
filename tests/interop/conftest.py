"""A vocabulary as released: in lower case, without accents."""

import pytest

from tests.models import small_vocab


@pytest.fixture(scope="session")
def vocab(text_file):
    return small_vocab(text_file)
