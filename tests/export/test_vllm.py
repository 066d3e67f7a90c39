"""Exports of SmolLM2: in transformers, and in real vLLM the native engine's greedy log-probs within each bound.

vLLM reads its first layers alone: every kind of weight is in each of them, and the time is theirs.
vLLM has a process of its own for w4a16, as users have it: there nothing has loaded the kernels before it is asked for
them. For the others it is a fork of one that has it imported.
fp8 is stored as w8a8 is, a scale a row; that vLLM multiplies it, whole runs show (rollout_vllm/test_vllm_runs.py).
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
import torch
from forks import ForkServer
from gguf_once import parsed_once
from tiny_exports import save_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.exporting import job, readers, verify
from qarl.exporting.job import export_target
from qarl.exporting.readers import Unsupported
from qarl.inference.masters import Masters
from qarl.inference.target import resolve_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCHEMES = {
    "bf16": {"scheme": "bf16"},
    "w4a16": {"scheme": "w4a16", "group_size": 64},
    "w8a8": {"scheme": "w8a8"},
    "w4a8": {"scheme": "w4a8", "group_size": 64},
}


OWN_PROCESS = "w4a16"
LAYERS = 2
TOKENS = 8


def first_layers(masters: Masters) -> Masters:
    """The masters of a model of the first LAYERS layers."""
    config = copy.deepcopy(masters.config)
    later = re.compile(rf"model\.layers\.({'|'.join(map(str, range(LAYERS, config.num_hidden_layers)))})\.")
    config.num_hidden_layers = LAYERS
    shapes = {name: shape for name, shape in masters.shapes.items() if not later.match(name)}
    return replace(
        masters, config=config, shapes=shapes, linears=frozenset(n for n in masters.linears if not later.match(n))
    )


@pytest.fixture(scope="module")
def exports(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """SmolLM2 from its GGUF as w4a16, and its first layers as bf16. Opening the GGUF takes longer than the rest."""
    places: dict[str, Path] = {}
    with parsed_once():
        masters = job.open_masters(resolve_target(smollm2))
    with pytest.MonkeyPatch.context() as patch:
        for name, opened in (("bf16", first_layers(masters)), ("w4a16", masters)):
            patch.setattr(job, "open_masters", lambda target, opened=opened: opened)
            target = resolve_target(smollm2, quant=SCHEMES[name])
            places[name] = tmp_path_factory.mktemp("smollm2") / name
            report = export_target(target, places[name], dtype=torch.bfloat16, max_shard_bytes=50 * 10**6)
            assert (report.tensor_bytes / report.bf16_bytes < 0.5) == (name == "w4a16")
    return places


@pytest.fixture
def forked(vllm_server: ForkServer) -> Callable[..., subprocess.CompletedProcess]:
    """`subprocess.run` of a probe as `read_vllm` calls it, which runs in a fork of the server."""

    def run(command: list[str], *, stdout: IO[str], check: bool, **rest) -> subprocess.CompletedProcess:
        assert command[:3] == [sys.executable, "-m", "qarl.exporting.vllm_probe"] and check
        if code := vllm_server.run(stdout.name, stdout.name, program=command[2], argv=command[3:]):
            raise subprocess.CalledProcessError(code, command)
        return subprocess.CompletedProcess(command, code)

    return run


def test_smollm2_is_quantized_and_loads_in_transformers(exports):
    out = exports["w4a16"]
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        likeliest = model(**prompt).logits[0, -1].topk(5).indices
    assert " Paris" in [tokenizer.decode(token) for token in likeliest]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("name", SCHEMES)
def test_vllm_agrees_with_the_native_engine(name, exports, tmp_path, monkeypatch, request):
    def unsupported(*arguments):
        raise Unsupported("transformers is not what this test is about")

    if name != OWN_PROCESS:
        monkeypatch.setattr(readers.subprocess, "run", request.getfixturevalue("forked"))
    monkeypatch.setattr(verify, "MAX_TOKENS", TOKENS)
    monkeypatch.setattr(verify, "read_transformers", unsupported)
    run = save_run(tmp_path / "run", exports["bf16"], steps=(1,), noise=0.0, **SCHEMES[name])
    run.export(tmp_path / "out", unpacked=name == "w4a8")
    record = verify.verify_export(resolve_target(str(run.path)), tmp_path / "out", device="cpu", say=print)
    found = {agreement["reader"]: agreement for agreement in record["readers"]}
    assert found["codes"]["status"] == found["qarl"]["status"] == "agrees"
    if name == "w4a16" and not torch.cpu._is_avx512_supported():  # the other schemes run on every x86 CPU
        assert "needs AVX-512" in found["vllm"]["reason"]
        return
    assert found["vllm"]["status"] == "agrees", found["vllm"]
    assert found["vllm"]["tokens"] == 4 * TOKENS and found["vllm"]["likeliest"] >= 3 * TOKENS
    assert json.loads((tmp_path / "out" / "verification.json").read_text())["ok"]
    assert not (tmp_path / "out" / "vllm.log").exists()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="of vLLM's CPU build")
@pytest.mark.parametrize(("scheme", "status"), [("bf16", "agrees"), ("w4a16", "skipped"), ("w8a8", "skipped")])
def test_experts_that_vllm_has_no_kernel_for_are_no_fault_of_the_export(
    tiny_model, scheme, status, tmp_path, monkeypatch, forked
):
    monkeypatch.setattr(readers.subprocess, "run", forked)
    quant = {"scheme": scheme, **({"group_size": 32} if scheme == "w4a16" else {})}
    run = save_run(tmp_path / "run", tiny_model("qwen3_moe"), steps=(1,), noise=0.0, **quant)
    run.export(tmp_path / "out")
    record = verify.verify_export(resolve_target(str(run.path)), tmp_path / "out", device="cpu", say=print)
    found = {agreement["reader"]: agreement for agreement in record["readers"]}["vllm"]
    assert record["ok"] and found["status"] == status, found
    assert status == "agrees" or found["reason"].endswith("has no kernel for quantized experts on a CPU")
