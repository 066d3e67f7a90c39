"""A check of layers of Triton kernels: on a GPU if there is one, else in Triton's interpreter."""

import pytest
import torch
from qarl_kernels.launch import INTERPRETED

from qarl.config import RolloutConfig
from qarl.exactness.engines import Native
from qarl.exactness.request import Request, Round
from qarl.exactness.verify import Check
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target
from qarl.policy.layer import DecoderLayer
from qarl.rollout.engine import SamplingParams
from qarl.types import Prompt

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device, or TRITON_INTERPRET=1"
)


def test_a_fault_of_a_kernel_is_found_where_it_is(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr("qarl.policy.policy.use_kernels", lambda *_: True)
    directory = tiny_model("llama", num_hidden_layers=1)
    rollout = RolloutConfig(max_num_seqs=2, max_batched_tokens=2)
    opened = open_policy(resolve_target(str(directory)), rollout=rollout, max_length=8)
    assert opened.policy.weights.fused
    real, engine = DecoderLayer._attend, Native(opened)

    def faulty(self, qkv, run):
        if hasattr(run.attention, "caches"):
            run.attention.caches[0][1][:, :, 0] = 1.0  # the values of every page's first token
        return real(self, qkv, run)

    def during(method):
        def run(*arguments):
            with monkeypatch.context() as patch:
                patch.setattr(DecoderLayer, "_attend", faulty)
                return method(*arguments)

        return run

    engine.sample, engine.trace = during(engine.sample), during(engine.trace)
    check = Check(opened.policy, engine, "tiny", "native")
    check.take(Round([Prompt(0, [7, 11, 13], "")], SamplingParams(1, 0, 2, Request().truncation)))
    check.trace()
    first = check.found.first
    assert not check.found.exact and (first.layer, first.operation) == (0, "attention"), first
    assert 0 < first.operation_position < first.position
