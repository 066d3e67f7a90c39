"""Memory estimates against counts written out by hand."""

from pathlib import Path

import pytest
from estimates import TINY, config
from qarl_formats.registry import make_scheme

from qarl.memory import estimate as memory
from qarl.memory import host
from qarl.memory.activations import plain_activation_bytes
from qarl.memory.tensors import optimizer_bytes, quantized_weight_bytes, saved_bytes, version_bytes
from qarl.utils.machine import machine_bytes

MATRICES = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 128 * 64)
PARAMETERS = MATRICES + 2 * 2 * 64 + 64 + 100 * 64


def sizes(device="cpu", **sections) -> dict[str, int]:
    return {item.name.split(" (")[0]: item.bytes for item in memory.estimate(config(**sections), TINY, device)}


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (make_scheme("w4a16", 32), 64 * 96 // 2 + 64 * 3 * 2),
        (make_scheme("w4a16", -1), 64 * 96 // 2 + 64 * 2),
        (make_scheme("w4a16", 32, symmetric=False), 64 * 96 // 2 + 64 * 3 * 2 + 64 // 8 * 4 * 3),
        (make_scheme("w8a8", scale_dtype="float32"), 64 * 96 + 64 * 4),
        (make_scheme("fp8"), 64 * 96 + 64 * 2),
        (make_scheme("fp8_block"), 64 * 96 + 2),
        (make_scheme("nvfp4a16"), 64 * 96 // 2 + 64 * 6 + 4),
    ],
    ids=["group", "channel", "zero_points", "int8", "fp8", "fp8_block", "nvfp4a16"],
)
def test_stored_weight(scheme, expected):
    assert quantized_weight_bytes(scheme, 64, 96) == expected


@pytest.mark.parametrize(("name", "bytes_per_matrix_parameter"), [("adamw", 8), ("muon", 4)])
def test_optimizer_state_and_a_checkpoint_of_it_with_the_masters(name, bytes_per_matrix_parameter):
    assert optimizer_bytes(name, 100, 10) == 100 * bytes_per_matrix_parameter + 10 * 8
    expected = (4 + bytes_per_matrix_parameter) * MATRICES + 12 * (PARAMETERS - MATRICES)
    assert saved_bytes(config(optim={"name": name}), TINY) == expected


def test_an_offloaded_optimizer_holds_two_buckets_on_the_gpu_and_its_state_on_the_host(monkeypatch):
    monkeypatch.setattr(memory, "OFFLOAD_BYTES", 1000)
    offloaded = config(optim={"offload": True})
    items = {item.name: item for item in memory.estimate(offloaded, TINY, "cuda") if "optimizer" in item.name}
    assert [(item.bytes, item.phase) for item in items.values()] == [(1000, "optimizer")]
    assert sizes("cuda")["optimizer state"] == 8 * PARAMETERS
    assert host.certain_bytes(offloaded, TINY, "cuda") == 8 * PARAMETERS
    assert host.certain_bytes(config(), TINY, "cuda") == 4 * PARAMETERS
    monkeypatch.setattr(host, "machine_bytes", lambda: 6 * PARAMETERS)
    assert "the moments that optim.offload keeps in host memory need" in host.too_large(offloaded, TINY, "cuda")
    assert host.too_large(config(), TINY, "cuda") is None


def test_activations_are_of_at_least_one_sequence_and_checkpointing_keeps_layer_inputs():
    shape = dict(tokens=7, layers=3, hidden=8, intermediate=16, heads=8, kv=4, width=2)
    one_layer = plain_activation_bytes(**{**shape, "layers": 1}, checkpointing=False)
    assert plain_activation_bytes(**shape, checkpointing=True) == 7 * 3 * 2 * 8 + one_layer
    assert sizes()["activations"] == sizes(train={"micro_batch_tokens": 32})["activations"]


def test_masters_gradients_and_operands_without_kernels():
    assert TINY.parameters == PARAMETERS
    assert sizes()["master weights"] == sizes()["gradients"] == 4 * PARAMETERS
    assert sizes()["GEMM operands"] == 4 * (MATRICES + 6400)  # float32, with the output layer
    assert sizes(quant={"learner": "full_precision"})["GEMM operands"] == 4 * (2 * MATRICES + 6400)
    assert sizes("cuda", quant={"kernels": "reference"})["GEMM operands"] == 2 * MATRICES  # in the compute dtype
    bf16 = sizes("cuda", quant={"scheme": "bf16", "group_size": None})
    assert (bf16["GEMM operands"], bf16["unquantized parameters"]) == (0, 2 * PARAMETERS)


def test_kernels_keep_int4_weights_in_blocks_of_16_by_128_and_ignored_layers_unquantized():
    rows = 2 * (64 + 2 * 32 + 64 + 2 * 128 + 64)  # every matrix has one block along its 64 or 128 inputs
    assert sizes("cuda")["GEMM operands"] == rows * (128 // 2 + 4 * 4)  # codes, and 4 bytes for each of 4 groups of 32
    for scheme in ("w8a8", "fp8", "fp8_block"):
        assert sizes("cuda", quant={"scheme": scheme, "group_size": None})["GEMM operands"] == 0
    ignored = sizes(quant={"ignore": ["lm_head", "re:.*mlp"]})
    assert ignored["codes and scales"] < sizes()["codes and scales"]
    assert ignored["unquantized parameters"] == sizes()["unquantized parameters"] + 2 * 2 * 3 * 128 * 64


def test_kv_caches_and_logits_of_decodes():
    fp8, plain = {"kv_cache_dtype": "fp8"}, {"kernels": "reference"}
    assert sizes()["KV cache"] == sizes(quant=fp8)["KV cache"] == 2 * (2 * 32) * 2 * (2 * 16) * 2
    assert sizes("cuda", quant=fp8)["KV cache"] == sizes("cuda")["KV cache"] / 2
    assert sizes("cuda", quant=fp8 | plain)["KV cache"] == sizes("cuda", quant=plain)["KV cache"]
    many = {"max_response_length": 8, "max_num_seqs": 200}
    train = {"steps": 1, "micro_batch_tokens": 10, "logprob_chunk": 5, "prompts_per_step": 50}
    assert "logits of decodes" not in sizes()
    assert sizes("cuda")["logits of decodes"] == 2 * 4 * 2 * 100
    assert sizes("cuda", rollout=many, train=train)["logits of decodes"] == 2 * 4 * 200 * 100
    ranked = sizes("cuda", rollout={**many, "top_p": 0.9}, train=train)
    assert ranked["logits of decodes"] == 41 * 128 * 100


def vllm(**settings):
    kernels = settings.pop("kernels", "vllm")
    return {"max_response_length": 8, "max_num_seqs": 2, "engine": "vllm", "linear_kernels": kernels, "vllm": settings}


def test_vllm_frees_the_learners_gpu_during_an_update_unless_it_never_sleeps():
    def phase(**settings):
        items = memory.estimate(config(rollout=vllm(**settings)), TINY, "cuda")
        return next(item.phase for item in items if item.name.startswith("vLLM weights and KV cache"))

    assert phase(sleep_level=0) == "always"
    assert phase() == phase(sleep_level=1) == phase(sleep_level=2) == "publish"
    own = sizes("cuda", rollout=vllm(device=1))  # on its own GPU
    assert "KV cache" not in own and not any("vLLM" in name for name in own)


LINEARS = {"quant": {"scheme": "w8a8", "group_size": None, "learner": "full_precision"}}
OTHERS = PARAMETERS - MATRICES  # norms and the embedding, which is the output layer too


def test_a_learner_of_another_dtype_and_a_reference_add_their_own_weights():
    plain, own = (sizes("cuda", **LINEARS, model={"path": "x", **m}) for m in ({}, {"learner_dtype": "float32"}))
    assert own["learner's own parameters"] == 4 * OTHERS and "learner's own parameters" not in plain
    assert own["GEMM operands"] - plain["GEMM operands"] == 2 * MATRICES
    assert own["activations"] > plain["activations"] and own["KV cache"] == plain["KV cache"]
    assert sizes(**LINEARS, model={"path": "x", "learner_dtype": "bfloat16"}) == sizes(**LINEARS)
    objective = {"objective": {"name": "grpo", "kl_coef": 0.1}}
    version = ("codes and scales", "unquantized parameters", "GEMM operands")
    assert sizes(**objective)["reference policy"] == sum(sizes()[name] for name in version)
    assert sizes("cuda", **LINEARS, **objective)["reference policy"] == 2 * MATRICES + 2 * OTHERS
    assert "reference policy" not in sizes()


GIB = 2**30


def machine(root: Path, files: dict[str, object]) -> int:
    meminfo = "MemTotal: 25165824 kB\nMemFree: 1 kB\nSwapTotal: 1048576 kB\n"
    for name, content in ({"proc/meminfo": meminfo} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return machine_bytes(root)


TWO, ONE = "sys/fs/cgroup", "sys/fs/cgroup/memory"
ROOT, NESTED, OLD = ({"proc/self/cgroup": text} for text in ("0::/", "0::/a/b", "5:cpu:/x\n4:memory:/job"))
LIMITED = {f"{ONE}/job/memory.limit_in_bytes": 3 * GIB, f"{ONE}/job/memory.memsw.limit_in_bytes": 3 * GIB}


@pytest.mark.parametrize(
    ("files", "gib"),
    [
        ({}, 25),
        (ROOT, 25),
        (ROOT | {f"{TWO}/memory.max": 4 * GIB}, 5),  # the machine's swap may be used
        (ROOT | {f"{TWO}/memory.max": 4 * GIB, f"{TWO}/memory.swap.max": 0}, 4),
        (NESTED | {f"{TWO}/a/memory.max": 2 * GIB, f"{TWO}/a/memory.swap.max": 0, f"{TWO}/a/b/memory.max": "max"}, 2),
        (OLD | LIMITED | {f"{ONE}/memory.limit_in_bytes": 2**63 - 4096}, 3),
    ],
)
def test_the_machines_memory_is_what_its_control_groups_allow(tmp_path, files, gib):
    assert machine(tmp_path, files) == gib * GIB


def test_a_model_that_cannot_fit_is_reported_in_one_line(monkeypatch):
    assert host.too_large(config(), TINY, "cpu") is None
    monkeypatch.setattr(host, "machine_bytes", lambda: 16 * PARAMETERS - 1)
    said = host.too_large(config(), TINY, "cpu")
    assert "masters, gradients and optimizer state need" in said and "\n" not in said
    assert host.too_large(config(), TINY, "cuda") is None


AHEAD = {"max_staleness": 3}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_earlier_versions_take_device_memory_or_host_memory_and_one_copy(device):
    """A version is codes and scales, unquantized parameters and operands; host memory has the first two."""
    own = {**config().model_dump()["rollout"], "async": AHEAD}
    before = sizes(device)
    version = before["codes and scales"] + before["unquantized parameters"]
    assert version_bytes(config(), TINY) == version
    operands = before["GEMM operands"]
    assert sizes(device, rollout=own)["weights of 3 earlier versions"] == 3 * (version + operands)
    given = config(rollout={**own, "async": {**AHEAD, "kept_versions": "host"}})
    items = {item.name: item for item in memory.estimate(given, TINY, device)}
    copy, kept = items["copy of an earlier version for logp_old"], items["weights of 3 earlier versions in host memory"]
    assert (copy.bytes, copy.phase) == (version + operands, "update")
    pinned = 1 << (version - 1).bit_length()
    assert pinned > version, "the power of two above"
    assert (kept.bytes, kept.phase) == ((4 * version, "always") if device == "cpu" else (4 * pinned, "host"))
    peak = memory.peak_bytes(list(items.values()))
    assert peak == memory.peak_bytes([item for item in items.values() if item.phase not in ("host", "sampler GPU")])
