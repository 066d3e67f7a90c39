"""Tiny exports in real vLLM, with the native engine's greedy log-probs.

vLLM runs in its own process for w4a16, as for users, so that nothing has loaded the kernels before. For the other
schemes it runs in a fork of a process that has it imported. fp8 is stored like w8a8, with one scale per row; whole runs
show that vLLM multiplies it (rollout_vllm/test_vllm_runs.py).
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from typing import IO

import pytest
import torch
from forks import Fork
from tiny_exports import save_run

from qarl.exporting import readers, verify
from qarl.exporting.readers import Unsupported
from qarl.inference.target import resolve_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCHEMES = {"w4a16": {"scheme": "w4a16", "group_size": 32}, "w4a8": {"scheme": "w4a8", "group_size": 32}}


OWN_PROCESS = "w4a16"
TOKENS = 8


@pytest.fixture
def forked() -> Callable[..., subprocess.CompletedProcess]:
    """`subprocess.run` of a probe as `read_vllm` calls it, which runs in a fork of the server."""

    def run(command: list[str], *, stdout: IO[str], check: bool, **rest) -> subprocess.CompletedProcess:
        assert command[:3] == [sys.executable, "-m", "qarl.exporting.vllm_probe"] and check
        if code := Fork("vllm_server", stdout.name, stdout.name, program="-m", argv=command[2:]).wait():
            raise subprocess.CalledProcessError(code, command)
        return subprocess.CompletedProcess(command, code)

    return run


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("name", SCHEMES)
def test_vllm_agrees_with_the_native_engine(name, tiny_model, tmp_path, monkeypatch, request):
    def unsupported(*arguments):
        raise Unsupported("transformers is not what this test is about")

    if name != OWN_PROCESS:
        monkeypatch.setattr(readers.subprocess, "run", request.getfixturevalue("forked"))
    monkeypatch.setattr(verify, "MAX_TOKENS", TOKENS)
    monkeypatch.setattr(verify, "read_transformers", unsupported)
    run = save_run(tmp_path / "run", tiny_model(head_dim=32), steps=(1,), noise=0.0, **SCHEMES[name])
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
def test_experts_that_vllm_has_no_kernel_for_are_no_fault_of_the_export(tiny_model, tmp_path, monkeypatch, forked):
    monkeypatch.setattr(readers.subprocess, "run", forked)
    run = save_run(tmp_path / "run", tiny_model("qwen3_moe"), steps=(1,), noise=0.0, **SCHEMES["w4a16"])
    run.export(tmp_path / "out")
    record = verify.verify_export(resolve_target(str(run.path)), tmp_path / "out", device="cpu", say=print)
    found = {agreement["reader"]: agreement for agreement in record["readers"]}["vllm"]
    assert record["ok"] and found["status"] == "skipped", found
    assert found["reason"].endswith("has no kernel for quantized experts on a CPU")
