"""`qarl.train`, `export`, `evaluate`, `compare` and `generate` from Python, on a tiny model."""

import json
from pathlib import Path
from unittest.mock import Mock

import forked_popen
import numpy as np
import pytest
from hand_made_runs import draw_nothing
from tiny_runs import settings, write_config

import qarl
from qarl.comparison import start_members
from qarl.config.source import override_texts, read_source
from qarl.exporting.readers import Unsupported


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("api")


@pytest.fixture(scope="module")
def trained(folder, tiny_model) -> qarl.types.TrainResult:
    data = settings(tiny_model(), train={"run_dir": folder / "run"}, logging={"console": "none", "tensorboard": False})
    return qarl.train(data, {"train.steps": 2, "optim.lr": 1e-3})


def test_names_exist_and_train_returns_the_run_its_metrics_and_its_checkpoint(trained, folder):
    assert set(qarl.__all__) <= set(dir(qarl))
    for name in qarl.__all__:
        assert getattr(qarl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        getattr(qarl, "trian")  # noqa: B009
    assert trained.finished and trained.exit_code == 0 and trained.step == 2
    assert trained.run_dir == folder / "run" and trained.checkpoint == folder / "run/checkpoints/000002"
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert trained.metrics == lines
    assert trained.series("reward/mean") == [line["reward/mean"] for line in lines]
    assert trained.series("no/such") == []


def test_train_resumes_the_run_and_takes_a_config_object(trained):
    config = read_source(trained.run_dir / "config.yaml").config()
    again = qarl.train(config, ["train.steps=3"])
    assert again.step == 3 and again.metrics[:2] == trained.metrics


def test_a_fault_is_a_user_error_with_the_key_and_no_exit(tiny_model):
    with pytest.raises(qarl.UserError, match=r"^configuration: quant\.scheme = .w5."):
        qarl.train({**settings(tiny_model()), "quant": {"scheme": "w5"}})
    with pytest.raises(qarl.UserError, match=r"^command line: train\.steps"):
        qarl.train(settings(tiny_model()), {"train.steps": 0})
    with pytest.raises(qarl.UserError, match="no such file"):
        qarl.train("absent.yaml")


@pytest.mark.parametrize(
    ("function", "given", "message"),
    [
        ("train", {"config": ["a"]}, r"config = \['a'\]: must be str or .* or Mapping\[str, Any\] or Config"),
        ("compare", {"target": "a.yaml", "reuse": "runs"}, r"reuse = 'runs': must be Sequence\[str"),
        ("generate", {"target": "m", "prompts": "a", "stop": "END"}, r"stop = 'END': must be Sequence\[str\] or None"),
        ("generate", {"target": "m", "prompts": "a", "device": "mps"}, "device = 'mps': must be 'auto' or 'cpu' or"),
        ("export", {"run": "r", "dtype": "fp32"}, "dtype = 'fp32': must be 'bf16' or None"),
        ("verify_exact", {"target": "m", "engine": "hf"}, "engine = 'hf': must be 'native' or 'vllm'"),
    ],
)
def test_an_argument_of_another_type_is_refused_and_not_taken_for_something_else(function, given, message):
    with pytest.raises(qarl.UserError, match=f"^{message}"):
        getattr(qarl, function)(**given)


def test_a_source_may_be_a_file_a_dict_or_a_config_and_means_the_same(tmp_path, tiny_model):
    data = settings(tiny_model(), train={"run_dir": str(tmp_path / "run")})
    file = write_config(tmp_path / "c.yaml", data)
    values = {"optim.lr": 3e-7, "rollout.stop": ("\n", "é")}
    configs = [read_source(source, values).config() for source in (file, str(file), data, qarl.Config(**data))]
    assert all(config == configs[0] for config in configs)
    assert (configs[0].optim.lr, configs[0].rollout.stop) == (3e-7, ["\n", "é"])
    assert override_texts(["a=1"]) == ["a=1"]
    assert data["rollout"].get("stop") is None  # the given dict is not changed
    assert read_source(settings(tiny_model())).config().run_dir == Path("runs/unnamed")


def test_export_returns_what_it_wrote_and_verifies_it(trained, folder, monkeypatch):
    monkeypatch.setattr("qarl.exporting.verify.read_vllm", Mock(side_effect=Unsupported("in tests/export")))
    done = qarl.export(trained.run_dir, folder / "served", verify=True)
    assert done.path == folder / "served" and done.same_as_run
    assert done.files == {p.name: p.stat().st_size for p in done.path.iterdir() if p.name in done.files}
    assert 0 < done.tensor_bytes < done.bf16_bytes and len(done.digest) == 64
    record = json.loads((folder / "served/verification.json").read_text())
    assert done.verification == record and done.verified == record["ok"]
    assert [r["status"] for r in record["readers"] if r["reader"] in ("codes", "qarl")] == ["agrees", "agrees"]
    with pytest.raises(qarl.UserError, match="exists and is not empty"):
        qarl.export(trained.run_dir, folder / "served")


def test_quantize_writes_a_model_that_generate_reads(tiny_model, tmp_path):
    done = qarl.quantize(tiny_model(), tmp_path / "q", "w8a8")
    assert not done.same_as_run and not done.verified and done.verification is None
    first, texts = qarl.generate(tmp_path / "q", ["one", "two"], max_new_tokens=4), {"one": 1, "two": 2}.keys()
    assert first == qarl.generate(tiny_model(), texts, max_new_tokens=np.int64(4), scheme="w8a8")
    assert [each.prompt for each in first] == ["one", "two"]
    assert all(len(each.token_ids) == len(each.logprobs) <= 4 for each in first)
    assert qarl.generate(tmp_path / "q", "one", max_new_tokens=4) == first[:1]


def test_evaluate_returns_the_results_and_their_directory(trained, folder):
    done = qarl.evaluate(trained.run_dir, samples=2, pass_at=[1, 2], max_prompts=3, console="none", out=folder / "eval")
    assert done.path == folder / "eval"
    assert done.results == json.loads((done.path / "results.json").read_text())
    assert set(done.pass_at) == {1, 2} and 0 <= done.avg <= done.pass_at[2] <= 1
    with pytest.raises(qarl.UserError, match=r"^--data gsm-8k: no such evaluation set; did you mean gsm8k\?"):
        qarl.evaluate(trained.run_dir, "gsm-8k")


def test_compare_of_runs_and_of_a_dict_returns_the_members(trained, folder, tiny_model, monkeypatch):
    draw_nothing(monkeypatch)
    forked_popen.install(start_members, replace=monkeypatch.setattr)
    data = settings(tiny_model(), train={"steps": 1}, logging={"tensorboard": False})
    done = qarl.compare(data, schemes=["w4a16", "w8a8"], out=folder / "schemes", jobs=2)
    assert done.exit_code == 0 and set(done.members) == {"w4a16-aligned-seed0", "w8a8-aligned-seed0"}
    assert {member["state"] for member in done.members.values()} == {"finished"}
    run = folder / "schemes/runs/w8a8-aligned-seed0"
    both = qarl.compare([trained.run_dir, run], out=folder / "both")
    assert both.path == folder / "both" and len(both.members) == 2
    with pytest.raises(qarl.UserError, match="--schemes: applies to a CONFIG"):
        qarl.compare([trained.run_dir, run], schemes=["bf16"])
    with pytest.raises(qarl.UserError, match="nothing to vary"):
        qarl.compare(data)


def test_compare_offline_returns_a_member_a_scheme(tiny_model, folder, monkeypatch):
    draw_nothing(monkeypatch)
    done = qarl.compare_offline(
        tiny_model(), ["bf16", "w4a16"], group_size=32, max_tokens=300, out=folder / "offline", device="cpu"
    )
    assert set(done.members) == {"bf16", "w4a16"} and done.exit_code == 0
    assert done.members["bf16"]["kl"]["mean"] == 0 < done.members["w4a16"]["kl"]["mean"]
