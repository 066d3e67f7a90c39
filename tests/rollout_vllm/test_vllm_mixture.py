"""A mixture of experts trained with vLLM as the sampler, in a process of its own, with the experts that it chose."""

import pytest
import torch
from needs_vllm import needs_cpu_build, needs_vllm
from run_faults import recorded
from tiny_runs import Qarl, settings, write_config

from qarl.config import Config
from qarl.errors import UserError
from qarl.policy.load_config import load_architecture
from qarl.rollout.vllm.launch import require_vllm

pytestmark = needs_vllm
FAST = {"engine": "vllm", "numerics": "fast"}
SPLIT = {"engine": "vllm", "vllm": {"tensor_parallel": 2, "device": 0}}


@pytest.mark.slow
@needs_cpu_build
def test_a_run_replays_what_vllm_chose_and_every_publish_of_experts_is_proved(
    qarl_with_vllm: Qarl, tiny_model, tmp_path
) -> None:
    rollout = {"engine": "vllm", "vllm": {"publish": "delta"}}
    sections = {"rollout": rollout, "train": {"steps": 2}, "checkpoint": {"every": 100}, "model": {"routing": "replay"}}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_model("qwen2_moe", decoder_sparse_step=2, **heads)  # an MLP, then experts with a shared one
    config = write_config(tmp_path / "c.yaml", settings(model, **sections))
    overrides = f"train.run_dir={tmp_path / 'run'}", "diagnostics.routing_every=1"
    done = qarl_with_vllm.run("train", config, *overrides)
    assert done.code == 0, done.err
    records = recorded(tmp_path / "run")
    for record in records:
        assert record["publish/proved_frac"] > 0.99
        assert record["mismatch/routing_disagreement"] == record["mismatch/delta_abs_max"] == 0
    assert 0 < records[1]["publish/sent_frac"] < 0.9


@pytest.mark.parametrize(
    ("sections", "device", "says"),
    [
        ({"rollout": FAST}, "cpu", "rollout.numerics: vLLM's CPU build keeps using"),
        ({"rollout": FAST, "quant": {"scheme": "w4a8"}}, "cuda", "rollout.numerics: vLLM does not support experts"),
        ({"rollout": SPLIT}, "cuda", "not supported for a mixture of experts"),
    ],
)
def test_what_vllm_cannot_do_with_experts_is_refused(tiny_model, sections, device, says) -> None:
    config = Config.model_validate(settings(tiny_model("mixtral"), **sections))
    with pytest.raises(UserError, match=says):
        require_vllm(config, torch.device(device), 512, load_architecture(config.model))
