"""Comparison of trained policies with the schemes of their initial model."""

import json

import pytest
from tiny_models import tiny_settings

import qarl


@pytest.fixture(scope="module")
def trained(tiny_model, tmp_path_factory):
    """A run that changed every weight, the output layer too, and its export."""
    folder = tmp_path_factory.mktemp("trained")
    settings = tiny_settings(tiny_model(), train={"run_dir": str(folder / "rl"), "threads": 1})
    qarl.train(settings)
    qarl.export(folder / "rl", folder / "served", for_vllm=False)
    return folder


def members_in(out):
    return {member["name"]: member for member in json.loads((out / "comparison.json").read_text())["members"]}


def test_a_run_and_its_export_get_the_same_numbers_against_the_model(tiny_model, tmp_path, compare, trained):
    given = [str(trained / "rl"), str(trained / "served")]
    code, _ = compare(tiny_model(), ["bf16", "w4a16"], trained=given)
    rows = members_in(tmp_path / "out")
    assert code == 0 and list(rows) == ["bf16", "w4a16", "rl", "served"]
    assert rows["bf16"]["kl"]["max"] == 0.0 and rows["rl"]["kl"]["mean"] > rows["w4a16"]["kl"]["mean"]
    for key in ("kl", "perplexity", "checkpoint_bytes", "weight_error"):
        assert rows["rl"][key] == rows["served"][key], key
    code, lines = compare(tiny_model(), ["bf16", "w4a16"], trained=given)
    assert code == 0 and "rl: measured before" in lines
