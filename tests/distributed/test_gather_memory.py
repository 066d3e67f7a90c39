"""The estimated memory of messages of codes, against what a rank holds while it gathers them, without a network."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pairwise import pairwise
from qarl_formats.scheme import Scheme, is_ignored
from tiny_runs import settings
from torch import Tensor

from qarl.config import Config
from qarl.config.architecture import Architecture
from qarl.config.mixture import Mixture
from qarl.config.quant import scheme_of
from qarl.distributed.exchange import GroupExchange, Pending, _Gathered, _Messages, _Unpacked
from qarl.memory import gathers as memory_gathers
from qarl.memory.gathers import codes_in_flight
from qarl.training import row_updates
from qarl.training.row_setup import plan_of
from qarl.utils.expert_names import EXPERT_NAMES
from qarl.weight_sync import codes, gathers

DENSE = Architecture("qwen3", 256, 768, 3, 4, 2, 64, 1000, 1024, tied_embeddings=False)
MIXTURE = replace(
    DENSE, family="qwen3_moe", mixture=Mixture(12, 2, 128, frozenset({0, 2}), True, EXPERT_NAMES["qwen3_moe"])
)
MESSAGE, RUN = 200_000, 400_000  # bytes: several messages of a small model, and several runs of a stack


class FirstRank(GroupExchange):
    """The first of `count` ranks, which receives nothing. most: Peak bytes held by its messages."""

    def __init__(self, count: int) -> None:
        super().__init__(None, 0, count, torch.device("cpu"))  # type: ignore[arg-type]
        self.most, self._pending = 0, []

    def begin_gathers(self, *given: Any, **named: Any) -> list[Pending]:
        found = super().begin_gathers(*given, **named)
        self._pending += found[:1]  # what a message holds, all its tensors hold
        self.most = max(self.most, sum(self._bytes(one) for one in self._pending))
        return found

    @staticmethod
    def _bytes(pending: Pending) -> int:
        if isinstance(pending, _Gathered):
            return pending._own.nbytes if hasattr(pending, "_own") else 0
        assert isinstance(pending, _Unpacked)
        if pending._unpacking._held is None:
            return 0
        own, message, arrived = pending._unpacking._held
        copied = message.untyped_storage().data_ptr() not in {one.untyped_storage().data_ptr() for one in own}
        return sum(one.nbytes for one in own) + arrived.nbytes + message.nbytes * copied

    def _all_gather(self, *given: Any) -> _Messages:
        return _Messages([])

    def _begin(self, *given: Any) -> _Messages:
        return _Messages([])

    def largest(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


def config(learner: str, quant: Mapping[str, Any]) -> Config:
    model = {"dtype": "bfloat16", "learner_dtype": None if learner == "aligned" else "float32"}
    own = {"learner": learner, "ignore": ["lm_head", r"re:.*\.mlp\.gate$"], "group_size": None, **quant}
    return Config.model_validate(settings(Path("x"), model=model, quant=own))


def held(own: Config, architecture: Architecture, count: int) -> int:
    """Peak bytes of the first rank's messages while a version is gathered, and the values that a learner needs."""
    scheme, inner = scheme_of(own.quant), {f"{name}.weight" for name, _, _ in architecture.linears()}

    def of(name: str) -> Scheme | None:
        ignored = is_ignored(name.removesuffix(".weight"), own.quant.ignore)
        return scheme if name in inner and scheme.quantized and not ignored else None

    plan = plan_of(dict(architecture.tensors()), of, count)
    rows: dict[str, Tensor] = {}
    for block in plan.blocks:
        sizes = [len(plan.cut(name)[0]) for name in block]
        whole = torch.randn(sum(sizes), *plan.shapes[block[0]][1:])
        rows |= zip(block, whole.split(sizes), strict=True)
    exchange = FirstRank(count)
    codes.gather_codes(rows, plan, exchange, of, torch.bfloat16, 1)
    if own.quant.learner != "aligned":
        row_updates.rounded_values(rows, plan, exchange, torch.float32)
    return exchange.most


@pytest.fixture(autouse=True)
def _small_messages():
    message, run = partial(gathers.BucketedGather, most=MESSAGE), partial(gathers.own_rows, most=RUN)
    with (
        patch.multiple(codes, BucketedGather=message, own_rows=run),
        patch.multiple(row_updates, BucketedGather=message, own_rows=run),
        patch.multiple(memory_gathers, MESSAGE_BYTES=MESSAGE, RUN_BYTES=RUN),
    ):
        yield


QUANT: Sequence[Mapping[str, Any]] = (
    {"scheme": "w4a16", "group_size": 32, "symmetric": False},
    {"scheme": "w4a16", "group_size": 128},
    {"scheme": "fp8_block", "group_size": None},
    {"scheme": "nvfp4a16", "group_size": None},
    {"scheme": "bf16", "group_size": None},
)


@pytest.mark.parametrize(("quant", "architecture", "count"), pairwise(QUANT, [DENSE, MIXTURE], [2, 3, 8]))
def test_messages_hold_the_estimated_bytes(quant, architecture, count) -> None:
    own = config("aligned", quant)
    assert held(own, architecture, count) == pytest.approx(codes_in_flight(own, architecture, count), rel=1e-3)


def test_a_learner_that_is_not_aligned_gathers_its_values_too() -> None:
    own = config("full_precision", {"scheme": "w4a16", "group_size": 128})
    estimated = codes_in_flight(own, MIXTURE, 4)
    assert estimated > 2 * codes_in_flight(config("aligned", {"group_size": 128}), MIXTURE, 4)
    assert held(own, MIXTURE, 4) == pytest.approx(estimated, rel=1e-3)
