"""Numbers of a run, and of several seeds together."""

import json
from pathlib import Path

import pytest
from comparisons import evaluation, record_of, settings_of, write_model

from qarl.comparison.members import checkpoint_bytes, entry_of, grouped, numbers_of
from qarl.comparison.plan import Member
from qarl.config import Config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config.model_validate(settings_of(write_model(tmp_path / "model")))


def test_numbers_are_quarters_maxima_and_medians_after_the_first_step(config, tmp_path):
    numbers = numbers_of(record_of(config, tmp_path, 8, [evaluation(0, 0.1), evaluation(8, 0.7)]))
    assert numbers["steps"] == 8
    assert numbers["reward_first_quarter"] == pytest.approx(0.15)  # steps 1, 2
    assert numbers["reward_last_quarter"] == pytest.approx(0.75)  # steps 7, 8
    assert numbers["mismatch_delta_abs_mean"] == pytest.approx(0.01)
    assert numbers["mismatch_delta_abs_max"] == pytest.approx(0.8)
    assert numbers["memory_peak_gib"] == 9.0
    assert numbers["step_s"] == 5.0  # of 2 to 8: the first step took 10
    assert numbers["evaluation"]["step"] == 8


def test_missing_values_and_a_missing_base_model_leave_only_their_own_numbers_empty(config, tmp_path):
    broken = {"mismatch__delta_abs_mean": None, "mismatch__delta_abs_max": None}
    numbers = numbers_of(record_of(config, tmp_path, 4, **broken))
    assert numbers["mismatch_delta_abs_mean"] is numbers["mismatch_delta_abs_max"] is None
    assert numbers["reward_last_quarter"] is not None
    (tmp_path / "model" / "config.json").unlink()
    numbers = numbers_of(record_of(config, tmp_path))
    assert numbers["checkpoint_bytes"] is None and numbers["reward_last_quarter"] is not None


@pytest.mark.parametrize(
    ("family", "scheme"), [("llama", "w4a16"), ("qwen2", "asymmetric"), ("qwen3", "w8a8"), ("qwen2", "bf16")]
)
def test_checkpoint_bytes_are_those_of_the_tensors(tiny_model, family, scheme):
    """Compare with the tensors that a publish would send, with tied weights once."""
    import torch
    from qarl_formats.weight import LowBitWeight

    from qarl.inference.masters import open_masters
    from qarl.inference.target import resolve_target

    quant = {"group_size": 32} if scheme in ("w4a16", "asymmetric") else {}
    quant |= {"scheme": "w4a16", "symmetric": False} if scheme == "asymmetric" else {"scheme": scheme}
    quant |= {"ignore": ["lm_head", "model.layers.0.mlp.up_proj"]}
    target = resolve_target(str(tiny_model(family)), quant=quant)
    total = 0
    for _, form in open_masters(target).forms(target.quant, torch.bfloat16, torch.device("cpu")):
        tensors = form.tensors.values() if isinstance(form, LowBitWeight) else [form]
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    config = Config.model_validate(settings_of(tiny_model(family), quant={"group_size": None, **quant}))
    assert checkpoint_bytes(config) == total


def seeds(config: Config, path: Path, rewards: list[float]) -> list[dict]:
    entries = []
    for seed, reward in enumerate(rewards):
        member = Member(f"m{seed}", "w4a16", "aligned", seed, path, config, "finished")
        entries.append(entry_of(member, record_of(config, path, **{"reward__mean": reward})))
    return entries


def test_several_seeds_have_a_range_or_a_t_interval_and_entries_are_strict_json(config, tmp_path):
    entries = seeds(config, tmp_path, [0.2, 0.6])
    assert grouped(entries[:1]) == []
    (group,) = grouped(entries)
    assert group["interval"] == "min-max" and group["seeds"] == [0, 1]
    assert group["reward_last_quarter"] == pytest.approx({"mean": 0.4, "low": 0.2, "high": 0.6})
    entries = seeds(config, tmp_path, [0.1, 0.2, 0.3])
    (group,) = grouped(entries)
    half = 4.302653 * 0.1 / 3**0.5  # the 97.5 % quantile of t with two degrees of freedom, from tables
    assert group["interval"] == "t95"
    assert group["reward_last_quarter"] == pytest.approx({"mean": 0.2, "low": 0.2 - half, "high": 0.2 + half}, abs=1e-6)
    entries[2]["state"] = "failed"
    assert grouped(entries)[0]["seeds"] == [0, 1]
    member = Member("m", "w4a16", "aligned", 0, tmp_path, config, "finished")
    entry = entry_of(member, record_of(config, tmp_path, mismatch__delta_abs_max=None))
    assert json.loads(json.dumps(entry, allow_nan=False)) == entry
