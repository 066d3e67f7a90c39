"""Loads published tensors into vLLM's layers: by a copy if the layer stores them unchanged, else by vLLM's reload.

vLLM's layerwise reload creates each layer's parameters anew, loads them, repacks them for its kernels and copies the
result into the tensors that CUDA graphs read. Its GPU work is small but its Python code is slow (0.2 to 0.3 s for 30
small layers on an H100's host). With `staging` the reload runs once from fixed buffers in checkpoint layout, captured
as a CUDA graph; each later load fills the buffers and replays the graph. The buffers take as much memory as the
repacked layers. Layers that store their published tensors unchanged need no reload and are written in place.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from qarl.rollout.vllm.own_kernels.graph_tensors import KernelTensors, scale_permutations, use_scale_permutations
from qarl.rollout.vllm.own_kernels.loaded_model import LoadedModel
from qarl.rollout.vllm.own_kernels.tensor_parallel import Shard, shard_of
from qarl.weight_sync.expert_tensors import part_experts
from qarl.weight_sync.fingerprints import METADATA, Fingerprint

logger = logging.getLogger("vllm.qarl")  # a child of vLLM's logger, so it writes to the sampler's log


class Loader:
    """Loads published tensors into a started vLLM.

    Args:
        worker: vLLM's worker.
        held: The published tensors in the loaded model.
        expected: Fingerprints of the snapshot in `checkpoint`, by published name.
        checkpoint: Directory that vLLM was started from.
        staging: Keep a copy of the published tensors of repacked layers, which patches are applied to.
        shard: The part of each tensor that this process has. vLLM's reload splits tensors itself.

    Attributes:
        kernel_tensors: Tensors of all layers that are not parameters or buffers; saved and restored around a sleep.
    """

    def __init__(
        self,
        worker: Any,
        held: LoadedModel,
        expected: Mapping[str, Fingerprint],
        checkpoint: Path,
        staging: bool,
        shard: Shard,
    ) -> None:
        self._worker, self._held, self._shard = worker, held, shard
        self._units = {name: held.unit_of(name).name for name in expected}
        device: torch.device = worker.device
        # On the CPU a library may hold a copy of a layer, which only vLLM's reload updates.
        self._plain = held.plain if device.type == "cuda" else frozenset()
        self._staging: dict[str, Tensor] = {}
        self._records = staging and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._members = {name: unit.members for name, unit in held.units.items() if unit.members}
        self.kernel_tensors = KernelTensors(self._modules(set(self._units.values())))
        if staging:
            wanted = [(name, p) for name, p in expected.items() if self._units[name] not in self._plain]
            self._staging = {name: torch.empty(p.shape, dtype=p.torch_dtype, device=device) for name, p in wanted}
            buffers_by_name = dict(part_experts(self._staging.items(), self._members))
            for name, tensor in stored(checkpoint, set(buffers_by_name), device):
                buffers_by_name.pop(name).copy_(tensor)
            assert not buffers_by_name, f"{next(iter(buffers_by_name))} is not in the checkpoint"

    def base(self, name: str, expected: Mapping[str, Fingerprint]) -> Tensor:
        """Return a published tensor of the last publish. expected: fingerprints, for shapes and dtypes."""
        return self._staging[name] if name in self._staging else next(self._held.read([name], expected))[1]

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load tensors into the model's layers.

        tensors: in checkpoint layout, by published name; without staging, all tensors of the snapshot.
        """
        plain = {name: tensor for name, tensor in tensors.items() if self._units[name] in self._plain}
        self._held.write({name: shard_of(name, tensor, self._shard) for name, tensor in plain.items()})
        repacked = {self._units[name] for name in tensors if name not in plain}
        if not repacked:
            return
        if not self._staging:
            self._reload([item for item in tensors.items() if item[0] not in plain])
            return
        for name, tensor in tensors.items():
            if name in self._staging and not name.endswith(METADATA):
                self._staging[name].copy_(tensor)
        if not self._records:
            self._reload([item for item in self._staging.items() if self._units[item[0]] in repacked])
        elif self._graph is None:
            self._record()
        else:
            self._graph.replay()

    def _record(self) -> None:
        """Load all staged tensors, and capture the reload as a CUDA graph if possible."""
        units = {self._units[name] for name in self._staging}
        self._reload(self._staging.items())  # compiles kernels and creates streams before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        before = [(module, dict(module._parameters), dict(module._buffers)) for module in self._modules(units)]
        try:
            with torch.cuda.graph(graph):
                self._reload(self._staging.items())
        except RuntimeError as error:  # a repacking that synchronizes with the device, such as NVFP4 in Marlin
            logger.warning("reloads of weights cannot run as a CUDA graph: %s", str(error).splitlines()[0])
            self._records = False
            _restore_tensors(before)
            self._reload(self._staging.items())  # the failed capture left tensors undefined
            return
        graph.replay()
        self._graph = graph

    def _reload(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load layers by vLLM's layerwise reload. tensors: all published tensors of these layers, by name."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        tensors = list(tensors)
        model = self._worker.model_runner.get_model()
        modules = self._modules({self._units[name] for name, _ in tensors})
        with set_current_vllm_config(self._worker.vllm_config), use_scale_permutations(self._permutations):
            for module in modules:
                initialize_layerwise_reload(module)
            if tensors := self._load_expert_stacks(tensors):
                model.load_weights(part_experts(tensors, self._members))
            for module in modules:
                finalize_layerwise_reload(module, self._worker.model_config)
        if self._worker.device.type == "cuda":  # only CUDA graphs read the original tensors
            self.kernel_tensors.copy_replaced()

    @cached_property
    def _permutations(self) -> tuple[Tensor, ...]:
        """The permutations on the device; created by the first reload, which is not captured."""
        return scale_permutations(self._worker.device)

    def _load_expert_stacks(self, tensors: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Load stacks of experts into layers whose reload has begun, if these layers get no other tensors.

        Returns the remaining tensors.
        """
        stacks: dict[str, dict[str, Tensor]] = {}  # by layer and by the name of vLLM's parameter
        mixed = set()
        for name, tensor in tensors:
            unit = self._held.unit_of(name)
            if unit.members:
                stacks.setdefault(unit.name, {})[f"{unit.stem}{name.rpartition('.')[2]}"] = tensor
            else:
                mixed.add(unit.name)
        layer_of = self._worker.model_runner.get_model().get_submodule
        taken = {name for name in stacks.keys() - mixed if load_expert_stacks(layer_of(name), stacks[name])}
        return [(name, tensor) for name, tensor in tensors if self._units[name] not in taken]

    def _modules(self, units: set[str]) -> list[nn.Module]:
        return [module for name, module in self._worker.model_runner.get_model().named_modules() if name in units]


def _restore_tensors(before: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]]) -> None:
    """Restore the layers' parameters and buffers after a failed reload."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module, parameters, buffers in before:
        get_layerwise_info(module).reset()
        for held, kept in ((module._parameters, parameters), (module._buffers, buffers)):
            held.clear()
            held.update(kept)


def stored(checkpoint: Path, names: set[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors of a checkpoint, on a device."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_tensor(name).to(device)) for name in file.keys() if name in names)  # noqa: SIM118


def load_expert_stacks(layer: nn.Module, stacks: Mapping[str, Tensor]) -> bool:
    """Register stacks of experts to be loaded at the end of a layer's reload, which has begun.

    vLLM's loaders take the tensors of one expert at a time, and the layerwise reload of vLLM 0.24 sums up all deferred
    tensors at every call. On an H200 that took 64 s for the 768 experts of 6 layers of Qwen3-30B-A3B in W4A16, and it
    grows faster than linearly with the number of layers. Here each parameter is one deferred load.

    Args:
        layer: vLLM's layer with the experts.
        stacks: All published tensors of the experts in checkpoint layout, by parameter name (`w13_weight_packed`).

    Returns:
        False, and nothing is done, if a stack has no parameter that stores it unchanged or transposed. vLLM's loaders
        may support it.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters: dict[str, Any] = {name: held for name, held in layer._parameters.items() if held is not None}
    prepared: dict[str, Tensor] = {}
    for name, stack in stacks.items():
        found = in_layout_of(name, stack, parameters[name]) if name in parameters else None
        if found is None:
            return False
        prepared[name] = found
    info = get_layerwise_info(layer)
    for name, parameter in parameters.items():
        parameter.weight_loader = _load_whole
        info.loaded_weights.append((name, inspect.signature(_load_whole).bind(parameter, prepared.get(name))))
    info.load_numel = 1  # above 0 and below the total, so that the layer is repacked at the end of the reload
    return True


def in_layout_of(name: str, stack: Tensor, parameter: nn.Parameter) -> Tensor | None:
    """Return a published stack in the layout of vLLM's parameter of all experts; None if the shapes do not match."""
    shape = parameter.shape
    if not shape or len(stack) % shape[0]:
        return None
    each = stack.unflatten(0, (shape[0], len(stack) // shape[0]))
    if name.endswith(tuple(suffix.removeprefix(".") for suffix in METADATA)):
        each = each[:, -shape[-1] :]  # stacks repeat it for gate and up, which have the same
    elif getattr(parameter, "is_transposed", False) and each.dim() == 3:
        each = each.transpose(1, 2)
    if each.dim() == 2 and each.shape[1] == 1 and len(shape) == 1:
        each = each[:, 0]  # one number per expert
    return each if each.shape == shape else None


def _load_whole(param: nn.Parameter, loaded: Tensor | None) -> None:
    """Weight loader of a whole parameter. loaded: None if no tensor is published for it, and no kernel reads it."""
    if loaded is None:
        param.data.zero_()
    else:
        param.data.copy_(loaded)
