"""The experts of each token of a request, assembled from the rows of vLLM's batches."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import fake_sampler
import numpy as np
import pytest
import torch
from needs_vllm import needs_vllm
from torch import Tensor

from qarl.errors import UserError
from qarl.policy.routes import numbers_of
from qarl.rollout.vllm import host
from qarl.rollout.vllm.recording import RoutingBuffer, RoutingRecorder, record_forwards

LAYERS, PER_TOKEN = 3, 2


class Forwards:
    """Stands for a model whose choice depends on a token's prefix; what a forward leaves is overwritten by the next."""

    def __init__(self) -> None:
        self.left = torch.full((32, LAYERS, PER_TOKEN), 77)

    def __call__(self, count: int) -> Tensor:
        return self.left[:count]

    def run(self, sequences: dict[str, list[int]], spans: list[tuple[str, int, int]]) -> tuple[SimpleNamespace, dict]:
        """A batch of the tokens [start, stop) of requests, by name."""
        rows = [self.choice(sequences[name], at) for name, start, stop in spans for at in range(start, stop)]
        self.left.fill_(77)
        self.left[: len(rows)] = torch.stack(rows)
        names = [f"{name}-1f2e3d4c" for name, _, _ in spans]
        batch = SimpleNamespace(
            req_ids=names, num_reqs=len(names), num_computed_tokens_cpu=np.array([start for _, start, _ in spans])
        )
        scheduled = {name: stop - start for name, (_, start, stop) in zip(names, spans, strict=True)}
        return batch, scheduled

    def choice(self, tokens: list[int], position: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum((i + 1) * t for i, t in enumerate(tokens[: position + 1])))
        return torch.stack([torch.randperm(9, generator=generator)[:PER_TOKEN].sort().values for _ in range(LAYERS)])


@pytest.mark.parametrize("experts", [9, 300])
def test_routing_is_assembled_from_chunks_cached_prefixes_and_preempted_requests(experts) -> None:
    forwards = Forwards()
    sequences = {"0": [5, 6, 7, 8, 9], "1": [5, 6, 7, 8, 3], "2": [4, 4]}
    recording = RoutingRecorder(forwards, experts)
    steps = [
        [("0", 0, 2)],  # a prompt in chunks
        [("0", 2, 4), ("2", 0, 1)],
        [("1", 3, 4), ("0", 4, 5)],  # 1 finds three tokens in the cache; 0's last token is beyond what is asked for
        [("0", 0, 3)],  # preempted, and computed again
    ]
    for spans in steps:
        recording.record(*forwards.run(sequences, spans))
    found = recording.routing([sequences[str(i)] for i in range(3)])
    for index, rows in enumerate(found):
        tokens = sequences[str(index)]
        assert rows.dtype == (torch.uint8 if experts == 9 else torch.int16)
        expected = torch.stack([forwards.choice(tokens, at) for at in range(len(tokens) - 1)])
        assert torch.equal(numbers_of(rows).long(), expected)


def test_routing_of_tokens_that_were_never_computed_is_unknown() -> None:
    forwards = Forwards()
    sequences = {"0": [5, 6, 7, 8], "1": [4, 6, 7, 8]}
    recording = RoutingRecorder(forwards, 9)
    recording.record(*forwards.run(sequences, [("0", 0, 3), ("1", 2, 3)]))
    known, cached = (numbers_of(rows) for rows in recording.routing(list(sequences.values())))
    assert (known >= 0).all() and (cached[:2] == -1).all() and (cached[2] >= 0).all()


def test_an_empty_step_is_not_recorded_and_the_runner_is_restored() -> None:
    class Runner:
        input_batch = SimpleNamespace(req_ids=["0-a"], num_reqs=1, num_computed_tokens_cpu=np.array([0]))

        def execute_model(self, scheduled):
            return scheduled.total_num_scheduled_tokens

    runner, recording, forwards = Runner(), RoutingRecorder(forwards := Forwards(), 9), forwards
    forwards.left[0] = torch.tensor([1, 2])
    with record_forwards(runner, recording):
        assert runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=0, num_scheduled_tokens={})) == 0
        forward = SimpleNamespace(total_num_scheduled_tokens=1, num_scheduled_tokens={"0-a": 1})
        assert runner.execute_model(forward) == 1
    assert "execute_model" not in vars(runner)
    (rows,) = recording.routing([[7, 8]])
    assert rows.tolist() == [[[1, 2]] * LAYERS]


def routed(monolithic: bool, buffers: bool) -> torch.nn.Module:
    """A model of two layers as vLLM has them, whose routers have chosen."""
    layers = torch.nn.ModuleList()
    for at in range(2):
        runner = torch.nn.Module()
        runner.routed_experts = torch.nn.Module()
        runner.routed_experts.quant_method = SimpleNamespace(is_monolithic=monolithic)
        runner.routed_experts.moe_config = SimpleNamespace(num_experts=4)
        runner.router = SimpleNamespace(capture_fn=None)
        if buffers:
            runner.router.capture_fn = RoutingBuffer(4, 2)
            runner.router.capture_fn(torch.tensor([[3 + at, 1], [0, 2 + at]]))
        layers.append(runner)
    return layers


@needs_vllm
def test_routers_give_the_layers_in_order_and_refuse_kernels_that_route_inside() -> None:
    from qarl.rollout.vllm.own_kernels.numerics import routers_of

    assert routers_of(routed(False, True))(2).tolist() == [[[1, 3], [1, 4]], [[0, 2], [0, 3]]]
    with pytest.raises(UserError, match=r"rollout\.numerics=exact"):
        routers_of(routed(True, True))
    with pytest.raises(ValueError, match="without qarl's buffers"):
        routers_of(routed(False, False))


@needs_vllm
@pytest.mark.parametrize("asked", [False, True])
def test_kernels_that_route_inside_are_refused_at_the_start_if_routing_is_needed(tmp_path, monkeypatch, asked) -> None:
    from qarl.rollout.vllm.own_kernels.numerics import routers_of

    monkeypatch.setattr(host, "start_vllm", lambda *_: SimpleNamespace(collective_rpc=lambda _: [None]))
    monkeypatch.setattr(host, "vllm_environment", lambda *_: {})
    monkeypatch.setattr(host, "keep_compiled_code_private", lambda: None)
    numerics = SimpleNamespace(started=lambda *_: None, experts=lambda: (routers_of(routed(True, True)), 4))
    monkeypatch.setattr(host, "numerics_of", lambda settings: numerics)
    settings = replace(fake_sampler.settings(tmp_path), on_gpu=True, routing=asked)
    with pytest.raises(UserError, match=r"model\.routing: vLLM's kernel") if asked else nullcontext():
        host.Host(settings, {})
