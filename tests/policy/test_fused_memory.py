"""Memory of a pass over fused layers, tensor by tensor, against `qarl.memory.activations`.

On a GPU, or else in Triton's interpreter with stand-ins for the products, which are slow there or run in float32.
"""

from __future__ import annotations

import gc

import pytest
import torch
from fused_models import DEVICE, NEEDS_TRITON, ON_GPU
from policy_models import make_policy, tokens
from qarl_formats.rows import adjacent
from qarl_formats.scheme import Codes
from qarl_formats.weight import LowBitWeight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qarl.config.architecture import read_config_json
from qarl.memory.activations import FusedPass
from qarl.policy import linear
from qarl.policy.attention import packed
from qarl.policy.policy import Policy
from qarl.weight_sync.quantize import quantize_parameters

pytestmark = NEEDS_TRITON
COUNT = 64
SCHEMES = ["bf16", "w8a8"] if ON_GPU else ["bf16"]  # the interpreter quantizes slowly
MODES = ["elementwise", "layer"]


class Held(TorchDispatchMode):
    """Bytes of the tensors made inside that are still there: now, and at their most."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: set[int] = set()
        self.most = 0

    def __enter__(self) -> Held:
        gc.freeze()  # or each collection would look through all of torch
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        gc.unfreeze()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and self._key(tensor) not in self._storages:
                self._before.add(self._key(tensor))
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor)
        if self.now > self.most:
            gc.collect()  # Triton's interpreter leaves a kernel's arguments in a cycle
            self.most = max(self.most, self.now)
        return result

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._before:
            self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    @property
    def now(self) -> int:
        self._storages = {key: found for key, found in self._storages.items() if not found[0].expired()}
        return sum(size for _, size in self._storages.values())


def product(self: LowBitWeight, x, bias=None) -> torch.Tensor:
    rows, dtype = (len(x.codes), x.dtype) if isinstance(x, Codes) else (len(x), x.dtype)
    return torch.zeros(rows, self.shape[0], dtype=dtype)


def values_of(self: LowBitWeight, dtype) -> torch.Tensor:
    return torch.zeros(self.shape, dtype=dtype) if self.quantized else self.tensors["weight"]


@pytest.fixture
def made(tiny_model, monkeypatch):
    """made(scheme, ...) -> a policy on fused layers, all of whose gradients are there, and its architecture."""
    monkeypatch.setattr("qarl.policy.policy.use_kernels", lambda *_: True)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(linear, "input_grad", torch.mm)
        monkeypatch.setattr(linear, "weight_grad", lambda dy, x, into: None)
        monkeypatch.setattr(LowBitWeight, "matmul", product)
        monkeypatch.setattr(LowBitWeight, "values", values_of)

    def make(scheme: str, inner: int = 192, **quant):
        directory = tiny_model("qwen3", num_hidden_layers=2, intermediate_size=inner)
        policy = make_policy(directory, scheme, torch.bfloat16, None, DEVICE, **quant)
        for packed_linear in policy.decoder.linears:
            linear.gradient_of(packed_linear.masters)
        for _, parameter in policy.named_parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return policy, read_config_json(directory / "config.json")

    return make


def inputs(policy: Policy):
    ids = torch.tensor(tokens(COUNT, 1), device=DEVICE)
    return ids, packed([(COUNT, [0])], DEVICE, True), torch.arange(COUNT, device=DEVICE)


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_forward_and_backward_hold_what_is_counted(made, scheme, recompute) -> None:
    policy, architecture = made(scheme)
    policy.set_recompute(recompute)
    ids, attention, rows = inputs(policy)
    counted = FusedPass(
        architecture, COUNT, "bfloat16", recompute, codes=scheme != "bf16", dequantized=scheme != "bf16"
    )
    with Held() as held:
        states = policy.decoder(ids, attention, policy.weights, rows)
        gc.collect()
        after = held.now
        states.backward(torch.ones_like(states))
    state = 2 * COUNT * architecture.hidden_size
    # Beside what layers keep the last norm's input and output; its inverse, and a few numbers of the layout.
    assert after == pytest.approx(counted.kept_bytes + 2 * state, rel=0.02)
    most = {name: size for name, size in counted.temporaries().items() if name != "output layer"}
    # This test holds the states, which the output layer would have dropped.
    assert held.most == pytest.approx(counted.kept_bytes + max(most.values()) + state, rel=0.03)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_forward_without_gradient_holds_what_is_counted(made, scheme) -> None:
    policy, architecture = made(scheme)
    ids, attention, _ = inputs(policy)
    with torch.no_grad(), Held() as held:
        policy.decoder(ids, attention, policy.weights)
    counted = FusedPass(architecture, COUNT, "bfloat16", "elementwise", codes=scheme != "bf16")
    assert held.most == pytest.approx(counted.forward_bytes, rel=0.03)


def test_one_group_at_a_time_is_there_twice_while_a_snapshot_is_made(made) -> None:
    policy, _ = made("bf16")
    masters = dict(policy.named_parameters())
    linears = policy.decoder.linears
    with Held() as held:
        snapshot = quantize_parameters(masters, lambda name: None, torch.bfloat16, 1)
        gc.collect()
        after = held.now
    several = [[snapshot.tensors[f"{name}.weight"] for name in one.names] for one in linears if len(one.names) > 1]
    assert len(several) == 4 and all(map(adjacent, several))
    largest = max(sum(t.nbytes for t in stack) for stack in several)
    assert 0 <= held.most - after - largest < 100  # and a flag per parameter, whether it is finite
    for name, tensor in snapshot.tensors.items():
        assert torch.equal(tensor, masters[name].to(torch.bfloat16)), name
