"""Fingerprints see every bit, dtype and shape, and a comparison names what is wrong and who holds it."""

import hashlib

import pytest
import torch
from qarl_kernels.digest import digest
from qarl_kernels.launch import INTERPRETED
from torch import Tensor

from qarl.weight_sync import fingerprints as module
from qarl.weight_sync.fingerprints import Fingerprint, PublishError, fingerprints, verify
from qarl.weight_sync.snapshot import describe


def fingerprint(tensor: Tensor) -> Fingerprint:
    return fingerprints([("t", tensor)])["t"]


@pytest.mark.parametrize("of", [fingerprint, describe])
def test_fingerprints_and_records_of_files_see_one_bit_the_shape_and_the_dtype_but_no_strides(of):
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64):
        tensor = torch.zeros(3, 5).to(dtype)
        other = tensor.clone()
        other.view(torch.uint8)[-1, -1] ^= 1
        assert of(tensor) != of(other)
    transposed = torch.arange(6).view(2, 3).t()
    assert of(transposed) == of(transposed.contiguous())
    found = {of(t) for t in (torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32))}
    assert len(found) == 3 and len({getattr(f, "digest", None) or f.sha256 for f in found}) == 1


def test_on_the_cpu_the_digest_is_sha256():
    tensor, sha256 = torch.arange(5, dtype=torch.int8), hashlib.sha256(bytes(range(5))).hexdigest()
    assert (fingerprint(tensor).digest, describe(tensor).sha256) == (f"sha256:{sha256}", sha256)


@pytest.mark.skipif(not INTERPRETED, reason="runs a kernel on CPU tensors: needs TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's numpy names products that wrap
@pytest.mark.parametrize("portion", [1, 100, 1 << 30])
def test_portions_of_any_size_give_every_tensor_its_digest(monkeypatch, portion: int):
    monkeypatch.setattr(module, "PORTION", portion)
    tensors = {f"t{size}": torch.arange(size) for size in (1, 7, 5, 0, 30)}
    portions = module._Portions()
    for name, tensor in tensors.items():
        portions.add(name, tensor)
    assert portions.digests() == {name: digest(tensor) for name, tensor in tensors.items()}


EXPECTED = fingerprints([("a", torch.zeros(2, 3)), ("b", torch.ones(4))])
FAULTS = {
    "missing": ({"a": EXPECTED["a"]}, r"version 3 is partial: 1 of 2 tensors did not arrive in vLLM, first 'b'"),
    "unknown": (EXPECTED | {"c": EXPECTED["a"]}, r"version 3: vLLM holds 'c', which was not sent"),
    "bytes": (EXPECTED | {"b": fingerprint(torch.zeros(4))}, r"version 3: 'b' differs in vLLM \(bytes\)"),
    "shape": (
        EXPECTED | {"a": fingerprint(torch.zeros(3, 2))},
        r"'a' differs in vLLM \(torch.float32 \(3, 2\) for torch.float32 \(2, 3\)\)",
    ),
    "dtype": (
        EXPECTED | {"b": fingerprint(torch.ones(4).int())},
        r"'b' differs in vLLM \(torch.int32 \(4,\) for torch.float32 \(4,\)\)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_comparison_names_the_version_the_tensor_and_the_holder(fault: str):
    held, message = FAULTS[fault]
    with pytest.raises(PublishError, match=message):
        verify(3, EXPECTED, held, "vLLM")


def test_equal_fingerprints_pass_in_any_order():
    verify(3, EXPECTED, dict(reversed(EXPECTED.items())))
