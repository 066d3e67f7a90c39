"""Turn whole tensors into the pieces that a single process saves."""

from collections.abc import Mapping

from torch import Tensor

from qarl.storage.pieces import Piece


def whole_pieces(tensors: Mapping[str, Mapping[str, Tensor]]) -> list[Piece]:
    """Return one piece per tensor. tensors: Group -> name -> tensor."""
    return [
        Piece(group, name, tuple(tensor.shape), 0, tensor.detach().reshape(-1))
        for group, members in tensors.items()
        for name, tensor in members.items()
    ]
