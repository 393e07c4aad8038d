"""The corpus and vocabulary of tests/data."""

from tests.data.conftest import documents, sentences, vocab  # noqa: F401
