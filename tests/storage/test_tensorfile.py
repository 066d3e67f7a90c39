"""Tensors on disk: bit-equal through `CheckpointStore`, and readable by the safetensors library."""

import torch
from safetensors.torch import load_file
from whole_pieces import whole_pieces

from qarl.storage import tensorfile
from qarl.storage.checkpoint import CheckpointStore
from qarl.storage.loading import load_checkpoint


def test_every_dtype_shape_and_layout_comes_back_bit_equal(tmp_path):
    dtypes = list(tensorfile.DTYPE_NAMES)
    tensors = {str(dtype): torch.randn(3, 5).mul(50).to(dtype) for dtype in dtypes}
    tensors["transposed"] = torch.randn(7, 4).t()
    tensors["strided"] = torch.randn(40)[::3]
    tensors["scalar"] = torch.tensor(3.25)
    tensors["empty"] = torch.empty(0, 4)
    tensors["nan"] = torch.tensor([float("nan"), float("inf"), -0.0])
    tensors["view"] = tensors["strided"]  # shares memory with another
    tensors["grad"] = torch.nn.Parameter(torch.randn(2))
    path = CheckpointStore(tmp_path, 0).save(10, whole_pieces({"optimizer": tensors}), {})
    loaded, by_library = load_checkpoint(path).tensors, load_file(path / "optimizer.safetensors")
    assert loaded["masters"] == {} and loaded["optimizer"].keys() == by_library.keys() == tensors.keys()
    for name, tensor in tensors.items():
        for back in (loaded["optimizer"][name], by_library[name]):
            assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape), name
            raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (back, tensor)]
            assert torch.equal(*raw), name
