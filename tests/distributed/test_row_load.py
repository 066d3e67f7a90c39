"""A rank's rows of the model's files, of a checkpoint, and of what a learner reads that is not aligned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from damaged_models import Weights, gguf_of
from policy_models import load
from ranks import run_ranks
from row_runs import CPU, Case, exchange_of, held, loss_of, offloading, reader, sha, twin
from safetensors.torch import load_file, save_file

from qarl.config import ModelConfig
from qarl.distributed.ranks import SingleProcess
from qarl.distributed.rows import RowPlan
from qarl.policy.load import load_model
from qarl.policy.load_rows import load_rows
from qarl.policy.policy import Policy
from qarl.training.row_setup import build_rows
from qarl.training.setup import build_policy


def plan_over(model: torch.nn.Module, count: int, unit: int) -> RowPlan:
    return RowPlan({name: p.shape for name, p in model.named_parameters()}, lambda name: unit, count)


def reads(group, model: dict[str, Any], unit: int) -> list[dict[str, Any]]:
    config = ModelConfig(**model)
    plan = plan_over(load_model(config), group.count, unit)
    rows = load_rows(config, plan, group)
    assert all(own.dtype == torch.float32 for own in rows.values())
    return [{name: [list(own.shape), sha(own)] for name, own in rows.items()}]


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


@pytest.mark.parametrize("model", ["shards in bfloat16", "code of its own", "gguf"])
def test_ranks_read_the_rows_that_the_whole_model_has(models, model) -> None:
    whole = load_model(ModelConfig(**models[model]))
    for count, unit in ((1, 1), (3, 64)):  # of 64 rows in blocks of 64 two ranks have none
        arguments = {"model": models[model], "unit": unit}
        found = (
            [reads(SingleProcess(), **arguments)] if count == 1 else run_ranks(count, f"{__file__}:reads", arguments)
        )
        plan = plan_over(whole, count, unit)
        for rank, (rows,) in enumerate(found):
            assert list(rows) == list(plan.shapes)
            for name, tensor in whole.named_parameters():
                cut = plan.cut(name)[rank]
                own = tensor.detach()[cut.start : cut.stop]
                assert rows[name] == [list(own.shape), sha(own)], name


def test_a_fault_of_one_rank_in_its_turn_is_not_waited_for(models) -> None:
    found = run_ranks(2, f"{__file__}:fails", {})
    assert found == ["ValueError: mine", "OtherRankFailed: rank 0: ValueError: mine"] or (
        found[0] == "ValueError: mine" and found[1].startswith("OtherRankFailed: rank 0")
    )


def fails(group) -> str:
    from qarl.policy.load_rows import in_turn

    def work() -> None:
        if group.rank == 0:
            raise ValueError("mine")

    try:
        in_turn(group, work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


MUON = {"optim": {"name": "muon", "lr": 1e-2, "adamw_lr": 1e-3}}
OFFLOADED = {"optim": {"offload": "all"}}


def goes_on(group, case: dict[str, Any], saved: str, meta: dict[str, Any]) -> dict[str, Any]:
    tensors, case = load_file(saved), Case(**case)
    with offloading():
        policy, updates = build_rows(case.config, CPU, None, exchange_of(group), group)
    refusals = []
    for wrong in ({**meta, "optimizer": "sgd"}, {**meta, "tensors": [*meta["tensors"], "x/exp_avg"]}):
        with pytest.raises(ValueError, match="optimizer state"):
            updates.load(reader(tensors), wrong, 2)
        refusals.append(policy.version)
    updates.load(reader(tensors), meta, 2)
    return {"versions": refusals, "digest": policy.current.manifest().digest(), **held(updates)}


@pytest.mark.parametrize("sections", [{}, MUON, OFFLOADED], ids=["adamw", "muon", "adamw on the host"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_state_is_put_back_at_any_number_of_ranks(tiny_model, tmp_path, count, sections) -> None:
    case = {"model": str(tiny_model("qwen3")), "sections": sections}
    told, tensors = twin(Case(case["model"], MUON if sections is MUON else {}), 2)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "saved.safetensors")
    meta = {"optimizer": "muon" if sections is MUON else "adamw", "tensors": told["state"]}
    arguments = {"case": case, "saved": str(tmp_path / "saved.safetensors"), "meta": meta}
    found = (
        [goes_on(SingleProcess(), **arguments)] if count == 1 else run_ranks(count, f"{__file__}:goes_on", arguments)
    )
    covered = dict.fromkeys(tensors, 0)
    for rank in found:
        assert rank["versions"] == [0, 0] and rank["digest"] == told["digests"][-1] and rank["state"] == told["state"]
        for what, (start, stop, _, digest) in rank["pieces"].items():
            assert digest == sha(tensors[what].reshape(-1)[start:stop]), what
            covered[what] += stop - start
    assert covered == {what: tensor.numel() for what, tensor in tensors.items()}


LEARNERS = {
    "full_precision": {"quant": {"learner": "full_precision", "group_size": 32}},
    "fake_quant": {"quant": {"learner": "fake_quant", "group_size": 32}},
    "float32": {"quant": {"learner": "full_precision", "group_size": 32}, "model": {"learner_dtype": "float32"}},
}


def losses(group, model: str) -> list[list[float]]:
    """The loss at first, and after a step."""
    found = []
    for sections in LEARNERS.values():
        policy, updates = build_rows(Case(model, sections).config, CPU, None, exchange_of(group), group)
        found.append([loss_of(policy, [0, 3]).item()])
        updates.backward(loss_of(policy, [0, 3]) if group.rank == 0 else None)
        updates.step(updates.norm())
        found[-1].append(loss_of(policy, [0, 3]).item())
    return found


def test_learners_that_are_not_aligned_read_the_values_of_all_rows(tiny_model) -> None:
    from qarl.training.updates import LocalUpdates

    model = str(tiny_model("qwen2"))
    expected = []
    for sections in LEARNERS.values():
        config = Case(model, sections).config
        policy: Policy = build_policy(config, load_model(config.model), CPU)
        updates = LocalUpdates(policy, config)
        expected.append([loss_of(policy, [0, 3]).item()])
        updates.backward(loss_of(policy, [0, 3]))
        updates.step(updates.norm())
        expected[-1].append(loss_of(policy, [0, 3]).item())
    for found in run_ranks(2, f"{__file__}:losses", {"model": model}):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine[0] == theirs[0] and mine[1] == pytest.approx(theirs[1], rel=1e-3) and mine[1] != mine[0]
