"""A compilation of kernels before vLLM starts that fails does not stop it."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from qarl_kernels.launch import collecting

from qarl.rollout.vllm.exact import precompile


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("no room")])
def test_a_precompilation_that_fails_is_one_line_of_the_log(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def pages() -> NoReturn:
        assert collecting()
        raise error

    lines: list[str] = []
    # vLLM, where another test imported it, passes no line on.
    monkeypatch.setattr(precompile.logger, "warning", lambda text, *parts: lines.append(text % parts))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    mode = SimpleNamespace(has_full_cudagraphs=lambda: False)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=8),
        model_config=SimpleNamespace(max_model_len=16),
        compilation_config=SimpleNamespace(cudagraph_mode=mode),
    )
    model = SimpleNamespace(fused=True, pages=pages)
    precompile.precompile(SimpleNamespace(get_model=lambda: model, device=torch.device("cpu"), vllm_config=config))
    assert lines == [f"kernels are compiled when they are needed: {type(error).__name__}: no room"]
    assert not collecting()
