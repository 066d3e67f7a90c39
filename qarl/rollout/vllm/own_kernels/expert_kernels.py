"""qarl's grouped products in the place of vLLM's for a layer's experts; vLLM routes, loads and schedules.

vLLM holds the experts of a layer in one module. Here it has, for each stored tensor of the scheme, one parameter of all
experts, gate and up under one another; what is made of them after a load are the operands of two stacks, gate and up
of the first expert, of the second, ... (E * 2I, H), and the experts' down (E * H, I). A GPU multiplies a stack at once,
grouped by expert; the CPU each expert's parts in the learner's shapes. As in `linear_kernels`, only one form of a
weight is held, and `published` gives back what was loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from qarl_formats.bits import Proof
from qarl_formats.scheme import Scheme, is_ignored
from qarl_formats.weight import UNQUANTIZED, LowBitWeight
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from qarl.experts import expert_stacks
from qarl.rollout.vllm.own_kernels.linear_kernels import hold
from qarl.rollout.vllm.own_kernels.ops import experts

HALVES = {"w13": 2, "w2": 1}  # weights of one expert under one another: gate and up, down


@dataclass(frozen=True)
class HeldStack:
    """One of the two stacks of a layer, prepared by a load.

    stem: of its parameters' names. shape: (N, K) of the whole stack. width: rows of one published weight. names: of
    the operands. kernels: Triton multiplies. published: what is asked back, see `stored`.
    """

    stem: str
    scheme: Scheme
    shape: tuple[int, int]
    width: int
    dtype: torch.dtype
    names: tuple[str, ...]
    kernels: bool

    def operands(self, layer: nn.Module) -> dict[str, Tensor]:
        """What the products read, of all experts."""
        return {name: getattr(layer, f"{self.stem}_{name}").data for name in self.names}

    def stored(self, layer: nn.Module, proof: Proof | None = None) -> dict[str, Tensor]:
        """The loaded tensors by parameter name, under one another; see `published`."""
        weight = LowBitWeight(self.scheme, {}, self.shape, self.operands(layer), self.dtype, self.kernels)
        found = weight.stored(proof)
        if "weight_global_scale" in found:  # of each published weight, and the same
            found["weight_global_scale"] = found["weight_global_scale"].repeat(self.shape[0] // self.width)
        return {f"{self.stem}_{name}": tensor for name, tensor in found.items() if name != "weight_shape"}


class ExpertsMethod(FusedMoEMethodBase):
    """The experts of one layer in a scheme. After a load `stacks` has both of them, by stem."""

    def __init__(self, moe: FusedMoEConfig, scheme: Scheme) -> None:
        super().__init__(moe)
        self.scheme = scheme
        self.stacks: dict[str, HeldStack] = {}

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        moe, inner = self.moe, intermediate_size_per_partition
        if moe.tp_size > 1 or num_experts != attributes.get("global_num_experts", num_experts):
            raise ValueError("qarl does not split experts between GPUs; use tensor_parallel_size 1")
        if self.scheme.quantized and self.scheme.name != "nvfp4a16":  # as vLLM holds these scales elsewhere
            kept = params_dtype if self.scheme.packed else torch.float32
            self.scheme = replace(self.scheme, scale_dtype=str(kept).removeprefix("torch."))
        self._sizes = {"w13": (inner, hidden_size), "w2": (hidden_size, inner)}
        self._experts, self._dtype = num_experts, params_dtype
        for stem, (n, k) in self._sizes.items():
            if self.scheme.quantized and not self.scheme.can_concatenate([n, n]):
                raise ValueError(f"experts of {n} rows share stored values of scheme {self.scheme.name}; use another")
            for suffix, shape, dtype in self._parameters(n, k):
                empty = torch.empty(num_experts, HALVES[stem], *shape, dtype=dtype)
                parameter = nn.Parameter(empty, requires_grad=False)
                parameter.weight_loader = load_part
                layer.register_parameter(f"{stem}_{suffix}", parameter)

    def _parameters(self, n: int, k: int) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Suffix, shape and dtype of the stored tensors of one weight."""
        if not self.scheme.quantized:
            return [("weight", (n, k), self._dtype)]
        specs = self.scheme.tensor_specs(n, k)
        return [(suffix, spec.shape, getattr(torch, spec.dtype)) for suffix, spec in specs.items()]

    def process_weights_after_loading(self, layer: nn.Module, kernels: bool | None = None) -> None:
        for stem, (n, k) in self._sizes.items():
            suffixes = [suffix for suffix, _, _ in self._parameters(n, k)]
            loaded = {suffix: getattr(layer, f"{stem}_{suffix}").data.flatten(0, 2) for suffix in suffixes}
            on_gpu = any(tensor.device.type != "cpu" for tensor in loaded.values()) if kernels is None else kernels
            shape = self._experts * HALVES[stem] * n, k
            _require_one_for_all(self.scheme, loaded)
            operands = self._operands(_stacked(self.scheme, loaded, shape), shape, on_gpu)
            for suffix in suffixes:
                delattr(layer, f"{stem}_{suffix}")
            for name, tensor in operands.items():
                hold(layer, f"{stem}_{name}", tensor)
            self.stacks[stem] = HeldStack(stem, self.scheme, shape, n, self._dtype, tuple(operands), on_gpu)

    def take(self, layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Hold other weights where the loaded ones are, without vLLM's loaders, of which each expert's tensors would
        want a call. tensors: as `published` gives them back, in any dtypes that hold the same values."""
        for stem, stack in self.stacks.items():
            parameters = self._parameters(*self._sizes[stem])
            dtypes = {suffix: dtype for suffix, _, dtype in parameters if suffix != "weight_shape"}
            given = {suffix: tensors[f"{stem}_{suffix}"].to(dtype) for suffix, dtype in dtypes.items()}
            made = self._operands(_stacked(self.scheme, given, stack.shape), stack.shape, stack.kernels)
            for name, held_ in stack.operands(layer).items():
                held_.copy_(made[name])

    def _operands(self, tensors: dict[str, Tensor], shape: tuple[int, int], kernels: bool) -> dict[str, Tensor]:
        operands = self.scheme.operands(tensors, shape, self._dtype, kernels)
        if "weight_tiled" in operands:
            operands.pop("weight_packed", None)
        return operands

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: vLLM's own kernels, which it describes, do not run."""

    def apply(
        self,
        layer: nn.Module,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """x: (T, H) of the compute dtype; weights and ids (T, k), in any order. Returns (T, H)."""
        gate_up, down = self.stacks["w13"], self.stacks["w2"]
        return experts(
            x,
            topk_weights,
            topk_ids,
            list(gate_up.operands(layer).values()),
            ",".join(gate_up.names),
            list(down.operands(layer).values()),
            ",".join(down.names),
            self.scheme.name,
            self._experts,
            gate_up.width,
            gate_up.kernels,
        )

    def published(self, layer: nn.Module, proof: Proof | None = None) -> dict[str, Tensor]:
        """The loaded tensors by the names of the parameters that they were loaded into, parts under one another.

        May be the held tensors themselves. What a product reads is then what these make: raises
        ValueError where it is not, or where there is a proof, its `settle` does.
        """
        return self.stacks["w13"].stored(layer, proof) | self.stacks["w2"].stored(layer, proof)


def load_part(
    param: nn.Parameter,
    loaded_weight: Tensor,
    weight_name: str,
    shard_id: str,
    expert_id: int,
    return_success: bool = False,
) -> bool | None:
    """A weight loader of vLLM: puts a stored tensor of one expert's gate (w1), up (w3) or down (w2) in its place."""
    param.data[expert_id, 1 if shard_id == "w3" else 0].copy_(loaded_weight)
    return True if return_success else None


def _stacked(scheme: Scheme, loaded: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
    """The stored tensors of a whole stack (N, K), of those of its weights under one another."""
    found = {}
    for suffix, tensor in loaded.items():
        if suffix == "weight_shape":
            found[suffix] = torch.tensor(shape)
        elif scheme.rows_per_entry(suffix) is None:
            found[suffix] = tensor[:1].clone()
        else:
            found[suffix] = tensor
    return found


def _require_one_for_all(scheme: Scheme, loaded: Mapping[str, Tensor]) -> None:
    """Raises ValueError where the weights of a stack do not share what the scheme has once for all of them."""
    for suffix, tensor in loaded.items():
        shared = suffix != "weight_shape" and scheme.rows_per_entry(suffix) is None
        if shared and not bool((tensor == tensor[:1]).all()):
            raise ValueError(
                "the experts of a layer have different global scales; qarl multiplies them with one, as its "
                "exports have it: export the checkpoint again"
            )


def method_for(layer: RoutedExperts, prefix: str, scheme: Scheme, ignore: list[str]) -> ExpertsMethod:
    """What multiplies the experts called `prefix`. ignore: of the checkpoint; all experts of a layer, or none."""
    stacks = expert_stacks(prefix, layer.moe_config.num_experts)
    ignored = {is_ignored(name, ignore) for names in stacks.values() for name in names}
    if len(ignored) > 1:
        raise ValueError(f"{prefix}: some experts are quantized and some are not; ignore all of a layer, or none")
    return ExpertsMethod(layer.moe_config, UNQUANTIZED if ignored == {True} else scheme)


def experts_method(module: nn.Module) -> ExpertsMethod | None:
    """What multiplies a module's experts if it is qarl's, else None."""
    method = getattr(module, "quant_method", None)
    return method if isinstance(method, ExpertsMethod) else None
