"""A rank's rows of the model's files, and the values that a learner without quantized arithmetic reads."""

from typing import Any

import pytest
import torch
from damaged_models import Weights, gguf_of
from policy_models import load
from ranks import run_ranks
from row_runs import CPU, Case, exchange_of, loss_of, sha

from qarl.config import ModelConfig
from qarl.distributed.ranks import SingleProcess
from qarl.distributed.rows import RowPlan
from qarl.policy.load import load_model
from qarl.policy.load_rows import load_rows
from qarl.training.row_setup import build_rows
from qarl.training.setup import build_policy
from qarl.training.updates import LocalUpdates


def plan_over(model: torch.nn.Module, count: int, unit: int) -> RowPlan:
    return RowPlan({name: p.shape for name, p in model.named_parameters()}, lambda name: unit, count)


def reads(group, models: dict[str, Any], unit: int) -> dict[str, dict[str, Any]]:
    """The shape and digest of this rank's rows of each master of each model."""
    found = {}
    for label, model in models.items():
        config = ModelConfig(**model)
        rows = load_rows(config, plan_over(load_model(config), group.count, unit), group)
        assert all(own.dtype == torch.float32 for own in rows.values())
        found[label] = {name: [list(own.shape), sha(own)] for name, own in rows.items()}
    return found


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory) -> dict[str, dict[str, Any]]:
    base = tmp_path_factory.mktemp("models")
    load(tiny_model("qwen2")).bfloat16().save_pretrained(base / "sharded", max_shard_size="60KB")
    assert len(list((base / "sharded").glob("*.safetensors"))) > 2
    gguf = gguf_of(Weights.of(tiny_model()), base / "gguf" / "m.gguf")
    return {
        "shards in bfloat16": {"path": str(base / "sharded")},
        "code of its own": {"path": str(tiny_model("qwen3")), "trust_remote_code": True},
        "gguf": {"path": str(gguf.parent), "gguf_file": gguf.name},
    }


def test_ranks_read_their_rows_of_the_whole_model(models) -> None:
    one = [reads(SingleProcess(), models, 1)]
    three = run_ranks(3, f"{__file__}:reads", {"models": models, "unit": 64})  # of a block of 64 rows two have none
    for found, unit in ((one, 1), (three, 64)):
        for label, model in models.items():
            whole = load_model(ModelConfig(**model))
            plan = plan_over(whole, len(found), unit)
            for rank, rows in enumerate(of[label] for of in found):
                assert list(rows) == list(plan.shapes)
                for name, tensor in whole.named_parameters():
                    cut = plan.cut(name)[rank]
                    own = tensor.detach()[cut.start : cut.stop]
                    assert rows[name] == [list(own.shape), sha(own)], (label, name)


LEARNERS = {
    "full_precision": {"quant": {"learner": "full_precision", "group_size": 32}},
    "fake_quant": {"quant": {"learner": "fake_quant", "group_size": 32}},
    "float32": {"quant": {"learner": "full_precision", "group_size": 32}, "model": {"learner_dtype": "float32"}},
}


def losses(group, model: str) -> list[list[float]]:
    """The loss before and after a step."""
    found = []
    for sections in LEARNERS.values():
        policy, updates = build_rows(Case(model, sections).config, CPU, None, exchange_of(group), group)
        found.append([loss_of(policy, [0, 3]).item()])
        updates.backward(loss_of(policy, [0, 3]) if group.rank == 0 else None)
        updates.step(updates.norm())
        found[-1].append(loss_of(policy, [0, 3]).item())
    return found


def test_learners_that_are_not_aligned_read_the_values_of_all_ranks(tiny_model) -> None:
    model = str(tiny_model("qwen2"))
    expected = []
    for sections in LEARNERS.values():
        config = Case(model, sections).config
        policy = build_policy(config, load_model(config.model), CPU)
        updates = LocalUpdates(policy, config)
        expected.append([loss_of(policy, [0, 3]).item()])
        updates.backward(loss_of(policy, [0, 3]))
        updates.step(updates.norm())
        expected[-1].append(loss_of(policy, [0, 3]).item())
    for found in run_ranks(2, f"{__file__}:losses", {"model": model}):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine[0] == theirs[0] and mine[1] == pytest.approx(theirs[1], rel=1e-3) and mine[1] != mine[0]
