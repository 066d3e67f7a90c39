"""What a run is made from, as digests: a resumed run must find it as it was, or be told that it may have changed."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from qarl.config import Config, ModelConfig
from qarl.distributed.ranks import Ranks
from qarl.distributed.rows import RowPlan
from qarl.objectives.custom import Custom
from qarl.policy.load_config import stop_token_ids
from qarl.policy.load_rows import load_rows
from qarl.rewards.fingerprint import reward_fingerprint
from qarl.storage.saved_state import Digests
from qarl.weight_sync.snapshot import Manifest, TensorRecord, describe


def input_digests(
    config: Config, generation_config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase, weights: str
) -> Digests:
    """SHA-256 of what a run of `config` is made from beside its prompts, which their stream has a digest of.

    generation_config: the model's. weights: `tensors_digest` of the model as it was loaded, before anything is rounded
    or quantized. Under `model`: weights (the masters' origin, and the reference of a KL term), vocabulary, and stop
    tokens (generation_config.json); under `reward`: `reward_fingerprint`; under `objective` the source of a user's own
    one, where there is one. Raises UserError for a file that cannot be read.
    """
    own_stop = sorted(stop_token_ids(generation_config, tokenizer))
    digests = {
        "model": {
            "weights": weights,
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
    return Manifest(0, _described(named)).digest()


def shared_tensors_digest(config: ModelConfig, shapes: Mapping[str, Sequence[int]], ranks: Ranks) -> str:
    """`tensors_digest` of the model's weights as `load_model` gives them; each rank reads and hashes some of them.

    shapes: of all, in their order.
    """
    plan = _WholeTensors(shapes, ranks.count)
    own = {name: tensor for name, tensor in load_rows(config, plan, ranks).items() if plan.owner[name] == ranks.rank}
    described = {name: (record.shape, record.dtype, record.sha256) for name, record in _described(own.items()).items()}
    found = {name: record for rank in ranks.gather(described) for name, record in rank.items()}
    return Manifest(0, {name: TensorRecord(tuple(found[name][0]), *found[name][1:]) for name in shapes}).digest()


class _WholeTensors(RowPlan):
    """A plan by which every tensor is one rank's: the largest ones first, to the rank that has least."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], count: int) -> None:
        super().__init__(shapes, lambda name: 1, count)
        self.owner: dict[str, int] = {}
        loads = [0] * count
        for name in sorted(shapes, key=lambda name: -math.prod(shapes[name])):
            self.owner[name] = min(range(count), key=loads.__getitem__)
            loads[self.owner[name]] += math.prod(shapes[name])

    def cut(self, name: str) -> list[range]:
        rows, owner = self.shapes[name][0], self.owner[name]
        return [range(0 if rank <= owner else rows, rows if rank >= owner else 0) for rank in range(self.count)]


def _described(named: Iterable[tuple[str, Tensor]]) -> dict[str, TensorRecord]:
    named = list(named)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the interpreter's lock
        records = pool.map(describe, [tensor for _, tensor in named])
        return dict(zip([name for name, _ in named], records, strict=True))


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
