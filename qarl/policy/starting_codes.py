"""GPTQ and AWQ: master weights that quantize to better codes than the model's own.

Both need the inputs of every linear layer. One forward over the calibration text computes them, in the sampler's
arithmetic: just before a linear multiplies, its input is noted (`Decoder.note`), the linear is quantized from it, and
the forward continues with the new codes. So each linear sees what the quantized linears before it produce, as in GPTQ's
"true sequential" order, and all text passes through the model once.

    gptq    codes from `qarl_formats.gptq`; the masters are `Scheme.preimage` of them
    awq     input channels are scaled by s = mean|x|^alpha, W' = W s, and the layer before gets 1 / s (Lin et al. 2023);
            alpha of 0, 0.1, ..., 1 minimizes ||X W^T - (X / s) Q(W s)^T||; the masters are W'

Either way the codes are those that `Scheme.quantize` makes of the masters, so training starts from them with no other
change to the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from qarl_formats.gptq import gptq
from qarl_formats.weight import LowBitWeight, concatenate
from torch import Tensor

from qarl.errors import UserError
from qarl.policy.attention import packed
from qarl.policy.layer import DecoderLayer
from qarl.policy.linear import PackedLinear, Part
from qarl.policy.policy import Policy
from qarl.utils.packed_linears import shared_scales

ALPHAS = tuple(step / 10 for step in range(11))
_ROWS = 4096  # of inputs in float32 at once
_INPUT_OF = {"input_norm": "qkv", "attention": "o", "mlp_norm": "gate_up", "activation": "down"}


@torch.no_grad()
def starting_masters(
    policy: Policy, method: str, sequences: Sequence[Sequence[int]], master: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """Compute the masters that differ from the given ones.

    Args:
        policy: In the scheme to quantize to. Its own weights are not changed, nor read by `gptq`.
        method: "gptq" or "awq".
        sequences: Token ids of the calibration text.
        master: Returns a float32 master by name.

    Returns:
        New masters by name, float32 on the policy's device: weights of quantized linears; with awq also norms and
        biases.

    Raises:
        UserError: The policy is a mixture of experts, or a linear cannot be calibrated.
    """
    if policy.experts:
        raise UserError(
            f"quant.init: {method}: a calibration text routes too few tokens to each expert; use rtn for a mixture of "
            "experts"
        )
    weights = policy.sampler.weights
    linears = dict(weights.linears)
    walk = (_GPTQ if method == "gptq" else _AWQ)(policy, linears, master)
    ids = torch.tensor([token for tokens in sequences for token in tokens], device=policy.device)
    attention = packed([(len(tokens), [0]) for tokens in sequences], policy.device, weights.fused)
    last = torch.tensor([len(ids) - 1], device=policy.device)
    with policy.decoder.noting(walk):
        policy.decoder(ids, attention, replace(weights, linears=linears), last)
    return walk.found


@torch.no_grad()
def replace_masters(policy: Policy, method: str, sequences: Sequence[Sequence[int]]) -> None:
    """Give a policy at version 0 the masters of `starting_masters`, and quantize them. For errors see there."""
    own = dict(policy.named_parameters())
    for name, value in starting_masters(policy, method, sequences, lambda name: own[name].detach()).items():
        own[name].copy_(value)
    policy.refresh(version=0)
    policy.sampler.install(policy.current)


class _Walk:
    """Quantizes every linear when the forward reports its input.

    linears: Weights of the forward; entries are replaced. master: Returns a master by name. found: The new masters.
    """

    def __init__(
        self, policy: Policy, linears: dict[PackedLinear, tuple[Part, ...]], master: Callable[[str], Tensor]
    ) -> None:
        self.policy, self.linears, self._master = policy, linears, master
        self.found: dict[str, Tensor] = {}

    def __call__(self, index: int, operation: str, *tensors: Tensor | None, rows: Tensor | None = None) -> None:
        """See `qarl.policy.trace.unnoted`."""
        if operation in _INPUT_OF:
            layer = self.policy.decoder.layers[index]
            linear = getattr(layer, _INPUT_OF[operation])
            modules = [name for name in linear.names if self.policy.quantized(name)]
            if modules:
                self.quantize(layer, linear, modules, self._input(linear, *tensors))

    def quantize(self, layer: DecoderLayer, linear: PackedLinear, modules: list[str], x: Tensor) -> None:
        """Choose the codes of a linear's quantized modules. x: Their input (T, K); may be changed in place."""
        raise NotImplementedError

    def master(self, name: str) -> Tensor:
        """Return the new master if there is one, else the given one: float32 on the policy's device."""
        return self.found[name] if name in self.found else self._master(name).to(self.policy.device)

    def _input(self, linear: PackedLinear, values: Tensor | None, *codes: Tensor | None) -> Tensor:
        """Return the activations (T, K) that a product reads, dequantized if the scheme quantizes them."""
        if values is None:
            given, scale = codes
            assert given is not None and scale is not None, "activations are values or codes"
            return given.float() * scale
        x = values.flatten(1)
        return self.linears[linear][0].weight.rounded_input(x) if self.policy.scheme.activation else x

    def multiply_with(self, linear: PackedLinear, weights: Mapping[str, LowBitWeight]) -> None:
        """Let the forward multiply with these weights by module."""
        policy = self.policy

        def rebuilt(part: Part) -> Part:
            if not weights.keys() >= set(part.names):
                return part
            own = [weights[name] for name in part.names]
            whole = own[0] if len(own) == 1 else concatenate(own)
            return part._replace(weight=whole.prepare(policy.dtype, policy.kernels))

        self.linears[linear] = tuple(map(rebuilt, self.linears[linear]))


class _GPTQ(_Walk):
    def quantize(self, layer: DecoderLayer, linear: PackedLinear, modules: list[str], x: Tensor) -> None:
        scheme, hessian = self.policy.scheme, hessian_of(x)
        masters = [self.master(f"{module}.weight") for module in modules]
        shared = scheme.shared(masters)
        if scheme.can_concatenate([len(master) for master in masters]):
            # Rows do not depend on each other, and one pass over the columns is faster.
            weights = self._chosen(modules, masters, hessian, shared)
        else:
            pairs = zip(modules, masters, strict=True)
            weights = [part for module, one in pairs for part in self._chosen([module], [one], hessian, shared)]
        self.multiply_with(linear, dict(zip(modules, weights, strict=True)))

    def _chosen(
        self, modules: list[str], masters: list[Tensor], hessian: Tensor, shared: Tensor | None
    ) -> list[LowBitWeight]:
        """Quantize concatenated modules, and keep their new masters."""
        scheme, widths = self.policy.scheme, [len(master) for master in masters]
        try:
            stored, master = gptq(torch.cat(masters), hessian, scheme, shared)
        except ValueError as error:
            raise UserError(f"quant.init: gptq: {', '.join(modules)}: {error}") from error
        self.found |= {f"{name}.weight": its for name, its in zip(modules, master.split(widths), strict=True)}
        return LowBitWeight(scheme, stored, (master.shape[0], master.shape[1])).split(widths)


class _AWQ(_Walk):
    def quantize(self, layer: DecoderLayer, linear: PackedLinear, modules: list[str], x: Tensor) -> None:
        before = _before(layer, linear)
        if before is None or len(modules) < len(linear.names):  # an ignored module would read scaled inputs too
            return
        hessian, sizes = hessian_of(x), x.float().abs().mean(0)
        masters = {module: self.master(f"{module}.weight") for module in modules}
        trials = [_smoothing(sizes, alpha) for alpha in ALPHAS]
        scale = min(trials, key=lambda scale: self._loss(masters, scale, hessian))
        for name in before:
            self._divide(name, scale)
        x.div_(scale)
        scaled = {module: master * scale for module, master in masters.items()}
        self.found |= {f"{module}.weight": master for module, master in scaled.items()}
        self.multiply_with(linear, self._quantized(scaled))

    def _quantized(self, masters: Mapping[str, Tensor]) -> dict[str, LowBitWeight]:
        scheme = self.policy.scheme
        shared = shared_scales(masters, scheme, lambda name: masters[name.removesuffix(".weight")])
        weights = {}
        for module, master in masters.items():
            stored, _ = scheme.quantize(master, shared=shared.get(f"{module}.weight"))
            weights[module] = LowBitWeight(scheme, stored, (master.shape[0], master.shape[1]))
        return weights

    def _loss(self, masters: Mapping[str, Tensor], scale: Tensor, hessian: Tensor) -> float:
        """||X W^T - (X / s) Q(W s)^T||^2 over the modules."""
        weights = self._quantized({module: master * scale for module, master in masters.items()})
        values = [weight.dequantize(torch.float32) / scale for weight in weights.values()]
        lost = torch.cat([*masters.values()]) - torch.cat(values)
        return float(((lost @ hessian) * lost).sum(dtype=torch.float64))

    def _divide(self, name: str, scale: Tensor) -> None:
        """Divide the output features of a norm, or of a linear's weight or bias, by `scale`."""
        master = self.master(name)
        self.found[name] = master / (scale if master.ndim == 1 else scale[:, None])


def _before(layer: DecoderLayer, linear: PackedLinear) -> list[str] | None:
    """Masters that produce the input of a linear, one output feature per input feature; None: there are none."""
    if linear is layer.qkv:
        return [layer.input_norm.name]
    if linear is layer.gate_up:
        return [layer.mlp_norm.name]
    source = layer.gate_up if linear is layer.down else layer.qkv
    if linear is layer.o and layer.heads != layer.kv_heads:  # several heads read one value
        return None
    module = source.names[-1]  # up or v: silu(gate) * up is linear in up, and attention in v
    return [f"{module}.weight", *([f"{module}.bias"] if source.biases else [])]


def _smoothing(sizes: Tensor, alpha: float) -> Tensor:
    """AWQ's s (K,): sizes^alpha, scaled so that its smallest and largest entries are reciprocals. sizes: mean|x|."""
    powers = sizes.clamp(min=1e-4).pow(alpha)
    return powers / (powers.max() * powers.min()).sqrt()


def hessian_of(x: Tensor) -> Tensor:
    """Return X^T X (K, K) in float32, of x (T, K)."""
    total = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    for rows in x.split(_ROWS):
        wide = rows.float()
        total.addmm_(wide.t(), wide)
    return total
