"""`qarl diagnose` on real runs of a tiny model."""

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_runs import settings, write_config

from qarl.batch.saved import read_rollouts
from qarl.cli.diagnose import numbers_table
from qarl.diagnose.diagnosis_page import explained, grouped
from qarl.diagnose.measure import diagnose, weight_metrics
from qarl.diagnose.policies import RunPolicy
from qarl.errors import UserError
from qarl.inference.target import resolve_target
from qarl.report.formatting import number
from qarl.storage.runs import read_metrics

EVERY = {"shadow_every": 1, "deployed_every": 1, "crossings_every": 1, "gradients_every": 1}


def train(qarl, tiny_model, path: Path, **sections: dict[str, Any]) -> Path:
    data = settings(
        tiny_model(),
        checkpoint={"every": 1, "keep_last": 0},
        logging={"tensorboard": False},
        train={"steps": 2, "run_dir": str(path)},
        **sections,
    )
    done = qarl.run("train", write_config(path.with_suffix(".yaml"), data))
    assert done.code == 0, done.err
    return path


@pytest.fixture(scope="module")
def mismatched(qarl, tiny_model, tmp_path_factory) -> Path:
    """A learner in full precision, whose ratio is to the sampler, with everything measured at every step."""
    path = tmp_path_factory.mktemp("runs") / "mismatched"
    return train(
        qarl, tiny_model, path, quant={"learner": "full_precision"}, correction={"preset": "bypass"}, diagnostics=EVERY
    )


@pytest.fixture(scope="module")
def diagnosis(qarl, mismatched) -> tuple[dict[str, Any], str]:
    done = qarl.run("diagnose", mismatched)
    assert done.code == 0, done.err
    return json.loads((mismatched / "diagnose" / "000002" / "diagnosis.json").read_text()), done.out


def test_it_writes_page_numbers_and_plots_and_says_what_they_mean(mismatched, diagnosis):
    contents, out = diagnosis
    directory = mismatched / "diagnose" / "000002"
    assert f"page: {directory / 'index.html'}" in out.replace("\n", "")
    assert {"log_probs_of_sampler_and_learner.png", "ratio_of_the_objective.png"} <= {
        path.name for path in (directory / "plots").iterdir()
    }
    assert contents["step"] == 2 and contents["left_out"] == []
    assert contents["findings"][0]["text"].split(".")[0] in out
    row = next(line for line in out.splitlines() if "precision/phantom_frac" in line)
    assert explained("precision/phantom_frac") in row, "a pipe gets the explanations too"


def test_what_it_recomputes_is_what_the_run_logged(mismatched, diagnosis):
    logged = read_metrics(mismatched / "metrics.jsonl")[-1]
    found = diagnosis[0]["record"]["metrics"]
    same = [n for n in found if n.startswith(("mismatch/", "error_tokens/", "quant/", "deployed/")) and n in logged]
    assert len(same) > 25 and {"deployed/efficiency", "quant/codes_changed_frac"} <= set(same)
    assert {name: found[name] for name in same} == {name: logged[name] for name in same}
    assert 0.0 < found["gradients/cos_total"] < 1.0 and found["precision/beta_abs_mean"] > 0.0
    assert diagnosis[0]["record"]["layers"]["model.layers.0.mlp.up_proj"][1] == 64 * 128


def test_the_terminal_explains_every_number_in_the_words_of_the_page(diagnosis):
    metrics = diagnosis[0]["record"]["metrics"]
    assert {name for _, rows in grouped(metrics) for name, _ in rows} == metrics.keys() and len(metrics) > 40
    file = io.StringIO()
    Console(file=file, width=200).print(numbers_table(metrics, "Step 2", 200))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 200
    rows = [[cell.strip() for cell in line.strip("│").split("│", 2)] for line in lines if line.startswith("│")]
    words = " ".join(filter(None, (row[2] for row in rows)))
    for name, value in metrics.items():
        assert explained(name) and explained(name) in words
        assert [row[1] for row in rows if row[0] == name] == [number(value)]


def test_the_learner_and_the_sampler_come_back_bit_for_bit(mismatched):
    policy = RunPolicy(resolve_target(str(mismatched), step=2), "cpu")
    saved = read_rollouts(mismatched, 2)
    assert saved.version == read_metrics(mismatched / "metrics.jsonl")[0]["policy/version"]
    policy.load(1)  # what step 2 sampled from
    assert torch.equal(policy.shadow_logprobs(saved), saved.logp_sampler)
    assert torch.equal(policy.logprobs(saved), saved.logp_old)


def test_argmax_flips_are_where_learner_and_sampler_prefer_another_token(mismatched, diagnosis):
    policy = RunPolicy(resolve_target(str(mismatched), step=2), "cpu")
    saved = read_rollouts(mismatched, 2)
    policy.load(2)
    flips = policy.argmax_flips(saved)
    assert flips.dtype == torch.bool and 0 < int(flips.sum()) < flips.numel()
    assert diagnosis[0]["record"]["metrics"]["precision/argmax_flip_frac"] == float(flips.double().mean())


def test_an_aligned_run_is_exact_and_what_is_missing_is_said(qarl, tiny_model, tmp_path):
    run = train(qarl, tiny_model, tmp_path / "aligned")
    shutil.rmtree(run / "checkpoints" / "000001")
    done = qarl.run("diagnose", run, "--no-gradients", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    contents = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    metrics = contents["record"]["metrics"]
    assert metrics["precision/beta_abs_max"] == metrics["mismatch/delta_abs_max"] == 0.0
    assert "deployed/improvement" not in metrics and "gradients/cos_total" not in metrics
    assert "checkpoint.every: 1" in contents["left_out"][0] and "--no-gradients" in contents["left_out"][1]
    assert "bit for bit" in done.out and not (run / "diagnose").exists()

    for path in (run / "rollouts").glob("*.safetensors"):
        path.unlink()
    refused = qarl.run("diagnose", run)
    (line,) = refused.err.splitlines()
    assert refused.code == 2 and line.startswith("error: ") and "logging.rollout_tensors: true" in line


def test_an_out_that_holds_something_else_is_refused_before_the_model_is_read(qarl, mismatched, tmp_path):
    for out, words in ((tmp_path / "file", "not a directory"), (tmp_path / "folder", "holds 'thesis.txt'")):
        (tmp_path / "folder").mkdir(exist_ok=True)
        (tmp_path / "folder" / "thesis.txt").write_text("mine")
        (tmp_path / "file").write_text("mine")
        refused = qarl.run("diagnose", mismatched, "--out", out)
        assert refused.code == 2 and refused.err.startswith(f"error: --out: {out}: {words}"), refused.err
        assert len(refused.err.splitlines()) == 1
    assert (tmp_path / "file").read_text() == "mine" and len(list((tmp_path / "folder").iterdir())) == 1


def test_a_damaged_checkpoint_of_the_step_before_leaves_out_what_needs_it_alone(mismatched, diagnosis, tmp_path):
    run = shutil.copytree(mismatched, tmp_path / "run")
    policy = RunPolicy(resolve_target(str(run), step=2), "cpu")
    saved, masters = read_rollouts(run, 2), run / "checkpoints" / "000001" / "masters.safetensors"
    masters.write_bytes(masters.read_bytes()[:100])
    found = diagnose(policy, saved, True, True, read_metrics(mismatched / "metrics.jsonl"), say=lambda line: None)
    (line,) = found.left_out
    assert re.search(
        r"^changes made by the step \(deployed/\*, code flips\): .*/masters.safetensors: 100 bytes, ", line
    )
    whole = diagnosis[0]["record"]["metrics"]
    assert found.metrics == pytest.approx(
        {name: value for name, value in whole.items() if not name.startswith(("deployed/", "quant/"))}
    )
    assert found.record["layers"] is None and "gradients/cos_total" in found.metrics


def test_unknown_tokens_and_a_checkpoint_that_went_are_refused_in_one_line(mismatched):
    policy = RunPolicy(resolve_target(str(mismatched), step=2), "cpu")
    saved = read_rollouts(mismatched, 2)
    policy.check_tokens(saved)
    saved.responses[1][0] = 10**6
    with pytest.raises(UserError, match=r"000002.safetensors: holds token 1000000, and the model has ") as error:
        policy.check_tokens(saved)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"000099: .* has removed it \(checkpoint.keep_last\)"):
        policy.load(99)


def test_a_step_of_replayed_experts_comes_back_bit_for_bit(qarl, tiny_model, tmp_path):
    model = {"path": str(tiny_model("mixtral")), "routing": "replay"}
    run = train(qarl, tiny_model, tmp_path / "replay", model=model, quant={"learner": "full_precision"})
    logged = read_metrics(run / "metrics.jsonl")[1]
    assert 0.0 < logged["mismatch/routing_disagreement"] < logged["mismatch/routing_tokens"] < 1.0
    policy, saved = RunPolicy(resolve_target(str(run), step=2), "cpu"), read_rollouts(run, 2)
    policy.check_tokens(saved)
    policy.load(1)
    assert torch.equal(policy.shadow_logprobs(saved), saved.logp_sampler)
    assert torch.equal(policy.logprobs(saved), saved.logp_old)
    with pytest.raises(UserError, match="its routing does not match the model's experts"):
        policy.check_tokens(replace(saved, routing=[torch.full_like(rows, 4) for rows in saved.routing]))


def test_weights_of_all_tokens_rejected_are_worth_nothing():
    assert weight_metrics(torch.zeros(4)) == {
        "weights/mean": 0.0,
        "weights/max": 0.0,
        "weights/ess_frac": 0.0,
        "weights/zero_frac": 1.0,
    }
    assert weight_metrics(torch.tensor([1.0, 1.0, 2.0, 0.0]))["weights/ess_frac"] == 16 / 24
    assert weight_metrics(None) == weight_metrics(torch.zeros(0)) == {}
