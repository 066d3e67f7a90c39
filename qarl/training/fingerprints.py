"""What a run is made from, as digests: a resumed run must find it as it was, or be told that it may have changed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qarl.config import Config
from qarl.objectives.custom import Custom
from qarl.policy.load import stop_token_ids
from qarl.rewards.fingerprint import reward_fingerprint
from qarl.storage.saved_state import Digests
from qarl.weight_sync.snapshot import Manifest, describe


def input_digests(config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Digests:
    """SHA-256 of what a run of `config` is made from beside its prompts, which their stream has a digest of.

    model: as it was loaded, before anything is rounded or quantized. Under `model`: weights (the masters' origin, and
    the reference of a KL term), vocabulary, and stop tokens (generation_config.json); under `reward`:
    `reward_fingerprint`; under `objective` the source of a user's own one, where there is one. Raises UserError for a
    file that cannot be read.
    """
    own_stop = sorted(stop_token_ids(model.generation_config, tokenizer))
    digests = {
        "model": {
            "weights": tensors_digest(model.named_parameters()),
            "vocabulary": _digest(sorted(tokenizer.get_vocab().items())),
            "stop tokens": _digest(own_stop),
        },
        "reward": reward_fingerprint(config.reward),
    }
    if isinstance(config.objective, Custom):
        digests["objective"] = config.objective.fingerprint()
    return digests


def tensors_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over names, dtypes, shapes and bits, in the order given. Some 1 GB/s and core."""
    names, tensors = zip(*named, strict=True)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the interpreter's lock
        return Manifest(0, dict(zip(names, pool.map(describe, tensors), strict=True))).digest()


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
