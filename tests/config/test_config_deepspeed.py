"""DeepSpeed's JSON, in the configuration or a file: keys that qarl decides or that have no effect are refused."""

import json

import pytest
import yaml
from plain_settings import plain_settings

from qarl.checks.check import check_inputs, check_run
from qarl.config import load_config
from qarl.config.deepspeed import deepspeed_keys, key_faults
from qarl.errors import UserError

READ = {
    "zero_optimization": {"reduce_bucket_size": 5e8, "reduce_scatter": False, "sub_group_size": 10},
    "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]},
    "dump_state": False,
}


@pytest.fixture
def config(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(plain_settings(distributed={"engine": "deepspeed"})))
    return "c.yaml"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"gradient_clipping": 1.0}, "config.gradient_clipping = 1.0: is decided elsewhere; set optim.max_grad_norm"),
        ({"zero_optimization": {"stage": 2}}, "stage = 2: is decided elsewhere; set distributed.zero"),
        ({"flops_profiler": {}}, "distributed.config.flops_profiler = {}: has no effect here; leave it out. Supported"),
        ({"zero_optimization": 3}, "distributed.config.zero_optimization = 3: must be a mapping"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "reduce_bucket_size = 0: must be a whole number above 0"),
        ({"zero_optimization": {"sub_group_size": True}}, "sub_group_size = true: must be a whole number above 0"),
        ({"zero_optimization": {"reduce_scatter": 1}}, "reduce_scatter = 1: must be true or false"),
        ({"comms_logger": {"prof_ops": "all_reduce"}}, 'prof_ops = "all_reduce": must be a list of names'),
    ],
)
def test_keys_that_are_refused(config, tmp_path, keys, said):
    with pytest.raises(UserError) as error:
        load_config(config, [f"distributed.config={json.dumps(keys)}"])
    assert said in str(error.value)
    (tmp_path / "ds.json").write_text(json.dumps(keys))
    with pytest.raises(UserError, match=r"command line: distributed\.config = \"ds\.json\": "):
        check_inputs(load_config(config, ["distributed.config=ds.json"]), config, ["distributed.config=ds.json"])


def test_keys_that_are_read(config, tmp_path):
    loaded = load_config(config, [f"distributed.config={json.dumps(READ)}"])
    assert deepspeed_keys(loaded.distributed.config) == READ and not list(key_faults(READ))
    (tmp_path / "ds.json").write_text(json.dumps(READ))
    assert deepspeed_keys(load_config(config, ["distributed.config=ds.json"]).distributed.config) == READ


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.name=muon", 'optim.name = "muon": DeepSpeed\'s Muon is a different algorithm'),
        ("optim.offload=all", 'optim.offload = "all": DeepSpeed offloads with another Adam'),
        ("distributed={engine: rows, config: {comms_logger: {}}}", "is only for DeepSpeed; leave it out"),
    ],
)
def test_settings_that_deepspeed_does_not_support_are_refused(config, override, said):
    with pytest.raises(UserError) as error:
        check_run(load_config(config, [override]), 2, None, config, [override])
    assert said in str(error.value)


def test_deepspeed_that_is_not_installed(config, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'qarl\[deepspeed\]'"):
        check_run(load_config(config), 2, None, config, [])
    check_run(load_config(config), 1, None, config, [])
