"""The experts of each token of a request, assembled from the rows of vLLM's batches."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from qarl.policy.routes import numbers_of
from qarl.rollout.vllm.recording import RoutingRecorder, record_forwards

LAYERS, PER_TOKEN = 3, 2


class Forwards:
    """Replaces a model that routes a token by its prefix. Each forward overwrites the experts of the previous one."""

    def __init__(self) -> None:
        self.left = torch.full((32, LAYERS, PER_TOKEN), 77)

    def __call__(self, count: int) -> Tensor:
        return self.left[:count]

    def run(self, sequences: dict[str, list[int]], spans: list[tuple[str, int, int]]) -> tuple[SimpleNamespace, dict]:
        """Return a batch of spans (request, start, stop), and its tokens per request."""
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
