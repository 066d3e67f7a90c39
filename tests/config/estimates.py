"""A small model and its configuration, for tests of the memory estimate."""

from plain_settings import plain_config

from qarl.config import Config
from qarl.config.architecture import Architecture

TINY = Architecture("llama", 64, 128, 2, 4, 2, 16, 100, 1024, tied_embeddings=True)


def config(**sections) -> Config:
    base = {
        "data": {"max_prompt_length": 24},
        "rollout": {"max_response_length": 8, "max_num_seqs": 2},
        "train": {"steps": 1, "micro_batch_tokens": 10, "logprob_chunk": 5, "recompute": "elementwise"},
        "quant": {"group_size": 32},
    }
    return plain_config(**{key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}})
