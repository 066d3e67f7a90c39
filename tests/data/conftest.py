"""The tokenizer of tiny models, without a model; a file whose tests need another one has its own."""

import pytest


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    from tiny_models import byte_tokenizer
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)
