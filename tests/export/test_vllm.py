"""Exports of SmolLM2 in real vLLM: the native engine's greedy log-probs within the bound of each scheme."""

from __future__ import annotations

import importlib.util

import pytest
from tiny_exports import save_run

from qarl.export import verify
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


@pytest.mark.parametrize("name", SCHEMES)
def test_vllm_agrees_with_the_native_engine(name, smollm2, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "MAX_TOKENS", 12)
    monkeypatch.setattr(verify, "read_transformers", lambda *arguments: pytest.skip("unused"))
    run = save_run(tmp_path / "run", smollm2, steps=(1,), noise=0.0, **SCHEMES[name])
    run.export(tmp_path / "out", unpacked=name == "w4a8")
    record = verify.verify_export(resolve_target(str(run.path)), tmp_path / "out", device="cpu", say=print)
    found = {agreement["reader"]: agreement for agreement in record["readers"]}
    assert found["codes"]["status"] == found["qarl"]["status"] == "agrees"
    if found["vllm"]["status"] == "skipped":
        pytest.skip(found["vllm"]["reason"])
    assert found["vllm"]["status"] == "agrees", found["vllm"]
