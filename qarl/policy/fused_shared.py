"""The shared expert of a mixture on a GPU: an MLP of all tokens, and how much of it each takes; both ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qarl_formats.scheme import InputCodes
from qarl_kernels.backward import weight_grad
from qarl_kernels.fused_norm import Normed
from qarl_kernels.moe.combine import shared_backward
from qarl_kernels.moe.routed import Shared
from qarl_kernels.moe.shared import shared_gate
from torch import Tensor

from qarl.policy.fused_mlp import FusedMLP
from qarl.policy.layer import LayerModules
from qarl.policy.projection import gradient_of
from qarl.policy.view import View

if TYPE_CHECKING:
    from qarl.policy.decoder import Decoder


@dataclass
class KeptShared:
    """What a backward finds of its forward over T tokens. gate_up: (T, 2 I). shared: what it gave."""

    gate_up: Tensor
    shared: Shared


class FusedShared:
    """Of one layer of one view. gate: the name of the gate's weight. codes: what codes its input comes as, if any."""

    def __init__(
        self, modules: LayerModules, gate: str, view: View, decoder: Decoder, codes: InputCodes | None
    ) -> None:
        gate_up, down = (view.projections[stack.names] for stack in modules.stacks[4:])
        self.mlp = FusedMLP(modules.index, gate_up, down, decoder, "shared_")
        self.value, self.master = view.values[gate], modules.masters[gate]
        self._codes = codes is not None and codes == gate_up.input_codes

    def forward(self, normed: Normed) -> KeptShared:
        """normed: (T, H), with codes where there are some."""
        x = normed.normed
        assert x is not None, "a gate reads values"
        if self._codes:
            return self._of(x, self.mlp.gate_up.of(x, normed.codes, normed.scale, x.dtype))
        return self._again(x)

    def _again(self, x: Tensor) -> KeptShared:
        """From values alone; with the same bits."""
        return self._of(x, self.mlp.gate_up(x))

    def _of(self, x: Tensor, gate_up: Tensor) -> KeptShared:
        gate = shared_gate(x, self.value, kernels=True)
        note, index = self.mlp.decoder.note, self.mlp.index
        note(index, "shared_gate", gate)
        note(index, "shared_gate_up", gate_up)
        return KeptShared(gate_up, Shared(self.mlp.forward(gate_up), gate))

    def backward(self, grad: Tensor, normed: Tensor, kept: KeptShared | None) -> Tensor:
        """grad: (T, H), of what the mixture gives; normed: (T, H), what it read. Returns the gradient of that, float32;
        masters get theirs. kept: is written over; None: it is computed again."""
        kept = kept or self._again(normed)
        grad_output, grad_logit = shared_backward(grad, kept.shared, into=kept.shared.output)
        logit = grad_logit[:, None]
        weight_grad(logit, normed.float(), into=gradient_of([self.master]))
        arriving = self.mlp.backward(grad_output, kept.gate_up, lambda: normed)
        return arriving.float().addcmul_(logit, self.value.float())
