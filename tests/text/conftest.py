"""The corpus, vocabulary and shards of tests/data."""

from tests.data.conftest import (  # noqa: F401
    built,
    corpus,
    documents,
    sentences,
    vocab,
    wiki_files,
)
