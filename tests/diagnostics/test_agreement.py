"""An exact run says once where sampler and learner differ; other runs promise nothing."""

import pytest
import torch
from tiny_runs import parts

from qarl.batch.columns import Column
from qarl.diagnostics.agreement import Agreement, promised


@pytest.fixture(scope="module")
def run(tiny_model):
    return parts(tiny_model("llama"), rollout={"ignore_eos": True})


def learned(run, watch: Agreement, changes: dict[tuple[int, int], float]):
    """A step whose sampler reported other log-probs in some places: (response, token) -> by how much."""
    batch = run.batch(lambda tokens: float(len(tokens)))
    values = [column.clone() for column in batch.logp_sampler]
    for (response, token), change in changes.items():
        values[response][token] += change
    batch.logp_sampler = Column(values)
    run.learn(batch, watch=watch)
    return batch


def test_what_agrees_is_not_spoken_of_and_the_first_difference_is_once(run):
    said: list[str] = []
    watch = Agreement(run.config, run.policy, said.append)
    learned(run, watch, {})
    assert said == []
    version = run.policy.version
    batch = learned(run, watch, {(3, 2): 0.5, (5, 0): -0.25})
    learned(run, watch, {(1, 1): 0.5})
    tokens = sum(map(len, batch.responses))
    assert said == [
        f"policy version {version}: sampler and learner should agree bit for bit, but 2 of {tokens} tokens differ, by "
        "up to 0.5 nats; the first is token 3 of response 4. To find the operation that differs, run qarl verify-exact "
        f"{run.config.model.path} --scheme w4a16 --group-size 32"
    ]


def test_a_log_prob_that_is_no_number_differs(run):
    said: list[str] = []
    learned(run, Agreement(run.config, run.policy, said.append), {(0, 0): float("nan")})
    assert len(said) == 1 and "but 1 of" in said[0] and "token 1 of response 1" in said[0]


def test_only_an_aligned_learner_of_the_engines_own_operations_promises_it(run, tiny_model, monkeypatch):
    assert promised(run.config, run.policy)
    other = parts(tiny_model("llama"), quant={"learner": "full_precision"})
    assert not promised(other.config, other.policy)
    for numerics in ("fast", "exact"):
        rollout = run.config.rollout.model_copy(update={"engine": "vllm", "numerics": numerics})
        assert promised(run.config.model_copy(update={"rollout": rollout}), run.policy) == (numerics == "exact")
    monkeypatch.setattr(run.policy, "device", torch.device("cuda"))
    assert not promised(run.config, run.policy)  # plain torch on a GPU: other products for other batches
    monkeypatch.setattr(run.policy, "kernels", True)
    assert promised(run.config, run.policy)
    said: list[str] = []
    monkeypatch.undo()
    learned(other, Agreement(other.config, other.policy, said.append), {(0, 0): 1.0})
    assert said == []
