"""Exports of SmolLM2 in real vLLM: the native engine's greedy log-probs within the bound of each scheme."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tiny_exports import save_run

from qarl.export import verify
from qarl.export.job import export_target
from qarl.export.readers import Unsupported
from qarl.inference.target import resolve_target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
SCHEMES = {
    "bf16": {"scheme": "bf16"},
    "w4a16": {"scheme": "w4a16", "group_size": 64},
    "w8a8": {"scheme": "w8a8"},
    "fp8": {"scheme": "fp8"},
    "w4a8": {"scheme": "w4a8", "group_size": 64},
}


@pytest.fixture(scope="module")
def directory(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a Hugging Face directory, which loads in a tenth of the time that its GGUF takes."""
    out = tmp_path_factory.mktemp("smollm2") / "bf16"
    export_target(resolve_target(smollm2), out, dtype=torch.bfloat16, max_shard_bytes=10**9)
    return out


@pytest.mark.parametrize("name", SCHEMES)
def test_vllm_agrees_with_the_native_engine(name, directory, tmp_path, monkeypatch):
    def unsupported(*arguments):
        raise Unsupported("transformers is not what this test is about")

    monkeypatch.setattr(verify, "MAX_TOKENS", 12)
    monkeypatch.setattr(verify, "read_transformers", unsupported)
    run = save_run(tmp_path / "run", directory, steps=(1,), noise=0.0, **SCHEMES[name])
    run.export(tmp_path / "out", unpacked=name == "w4a8")
    record = verify.verify_export(resolve_target(str(run.path)), tmp_path / "out", device="cpu", say=print)
    found = {agreement["reader"]: agreement for agreement in record["readers"]}
    assert found["codes"]["status"] == found["qarl"]["status"] == "agrees"
    if name == "w4a16" and found["vllm"]["status"] == "skipped":  # the other schemes run on every x86 CPU
        pytest.skip(found["vllm"]["reason"])
    assert found["vllm"]["status"] == "agrees", found["vllm"]
    assert found["vllm"]["tokens"] == 4 * 12 and found["vllm"]["likeliest"] >= 36
    assert json.loads((tmp_path / "out" / "verification.json").read_text())["ok"]
    assert not (tmp_path / "out" / "vllm.log").exists()
