"""Optimizers over FP32 master weights: AdamW, or Muon for hidden matrices and AdamW for the rest.

AdamW runs fused: one elementwise pass over each parameter and its state, without the temporary tensors of the foreach
implementation. It is bitwise repeatable, because no element depends on the order of a sum. On a GPU one launch covers
dozens of tensors or about 20 million elements.

Muon is `torch.optim.Muon` (Jordan et al. 2024), on a GPU batched over equal shapes (`qarl.training.muon`). Its
Newton-Schulz iteration runs in bf16, which is slow on a CPU without bf16 instructions. Updates are scaled with
`match_rms_adamw`, 0.2 sqrt(max(N, K)) (Liu et al. 2025, "Muon is scalable for LLM training"), so that one learning rate
suits matrices of every shape and the AdamW part. torch's alternative, `original`, was rejected: its updates shrink with
the width of the layer.

With `optim.offload` the state, and optionally the master weights, stay in host memory (`qarl.training.host_state`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from qarl.config import OptimConfig
from qarl.errors import UserError
from qarl.policy.device import DTYPES
from qarl.training.host_state import Offloaded
from qarl.training.muon import BatchedMuon
from qarl.training.offload import OffloadedAdamW
from qarl.training.offload_muon import OffloadedMuon
from qarl.utils.expert_names import is_router

# State tensors that torch keeps per parameter.
_STATE = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "muon": {"momentum_buffer"}}


class Optimizer:
    """One or two torch optimizers that step together, with state addressed by parameter name.

    Args:
        kind: `optim.name`.
        parts: Name -> (torch optimizer, names of its parameters in the order of its groups).
        master_dtype: dtype to whose values parameters are rounded after every step. They are stored in float32 in any
            case; float32 means no rounding.
    """

    def __init__(
        self,
        kind: str,
        parts: dict[str, tuple[torch.optim.Optimizer, list[str]]],
        master_dtype: torch.dtype,
    ) -> None:
        self.kind, self.master_dtype = kind, master_dtype
        self._parts = parts

    def step(self) -> None:
        """Update all parameters and round them to `master_dtype`."""
        for part, _ in self._parts.values():
            part.step()
            if not (isinstance(part, Offloaded) and part.values):  # offloaded masters are rounded on the GPU, in `step`
                round_masters(_parameters(part), self.master_dtype)

    def zero_grad(self) -> None:
        """Free all gradients."""
        for part, _ in self._parts.values():
            part.zero_grad(set_to_none=True)

    def set_lr(self, factor: float) -> None:
        """Scale the configured learning rate of every group by `factor`; see `lr_at`."""
        for part, _ in self._parts.values():
            for group in part.param_groups:
                group["lr"] = group["initial_lr"] * factor

    def masters(self) -> dict[str, Tensor]:
        """Return the master weights by name, on the host if they are offloaded. They are not copies.

        Offloaded values may still be on their way to the host. Work on the CUDA stream of the step may read them at
        once; code that reads them on the CPU must call `settle` first.
        """
        return {
            name: part.values[parameter] if isinstance(part, Offloaded) and part.values else parameter.detach()
            for part, names in self._parts.values()
            for name, parameter in zip(names, _parameters(part), strict=True)
        }

    def settle(self) -> None:
        """Wait until the offloaded state is on the host."""
        for part, _ in self._parts.values():
            if isinstance(part, Offloaded):
                part.settle()

    def state_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimizer state for a checkpoint.

        Hyperparameters are not included: they come from the configuration, and the learning rate from the schedule.

        Returns:
            Tensors by name (`model.layers.0.mlp.up_proj.weight/exp_avg`), not copied, on the host if offloaded; and
            JSON-able metadata. A parameter that never had a gradient has no state.
        """
        self.settle()
        tensors = {
            f"{name}/{key}": value
            for part, names in self._parts.values()
            for name, parameter in zip(names, _parameters(part), strict=True)
            for key, value in part.state.get(parameter, {}).items()
        }
        return tensors, {"optimizer": self.kind, "tensors": sorted(tensors)}

    def load_state(self, meta: dict[str, Any], read: Callable[[str, torch.Size], Tensor]) -> None:
        """Restore the state of `state_tensors`, whether it was offloaded or not. The next step has the same bits.

        Args:
            meta: Its metadata.
            read: `read(name, shape)` returns a float32 tensor, which is copied.

        Raises:
            ValueError: The state belongs to another optimizer or another model, or is incomplete. Nothing has been
                changed.
        """
        if meta["optimizer"] != self.kind:
            raise ValueError(f"optimizer state of {meta['optimizer']!r} does not fit optim.name {self.kind!r}")
        keys = {name: _STATE[kind] for kind, (_, names) in self._parts.items() for name in names}
        found: dict[str, list[str]] = {}
        for full_name in meta["tensors"]:
            name, _, key = full_name.rpartition("/")
            if name not in keys:
                raise ValueError(f"optimizer state {full_name} belongs to a parameter that the model does not have")
            found.setdefault(name, []).append(key)
        for name, own in found.items():
            if odd := sorted(keys[name].symmetric_difference(own)):
                raise ValueError(f"optimizer state of {name}: {odd[0]} is missing or does not belong to {self.kind}")

        for part, names in self._parts.values():
            state: dict[int, dict[str, Tensor]] = {}
            for i, (name, parameter) in enumerate(zip(names, _parameters(part), strict=True)):
                for key in found.get(name, ()):
                    value = read(f"{name}/{key}", torch.Size() if key == "step" else parameter.shape)
                    state.setdefault(i, {})[key] = _own(value, parameter, part)
            part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})


def build_optimizer(
    named_parameters: Iterable[tuple[str, Parameter]],
    optim_cfg: OptimConfig,
    muon: Callable[..., torch.optim.Optimizer] | None = None,
) -> Optimizer:
    """Build the optimizer of the `optim` section. Parameters that need no gradient are left out.

    AdamW applies weight decay to matrices only, not to norms and biases. With `optim.name: muon`, AdamW updates
    everything that is not a hidden matrix (`is_hidden_matrix`), at `adamw_lr` or, by default, `lr`.

    Args:
        named_parameters: (name, parameter) pairs.
        optim_cfg: The `optim` section.
        muon: Builds the Muon part, even if there are no hidden matrices. It is called like `BatchedMuon`, and with
            `masters` and `rounded` if the state is offloaded. Default: `BatchedMuon` or `OffloadedMuon`, if there are
            hidden matrices.

    Raises:
        UserError: `optim.offload` is set but the parameters are on the CPU.
    """
    rounded = DTYPES[optim_cfg.master_dtype]
    trained = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    if optim_cfg.offload:
        _require_device(parameter for _, parameter in trained)
    if optim_cfg.name == "adamw":
        return Optimizer("adamw", {"adamw": adamw(trained, optim_cfg.lr, optim_cfg)}, rounded)
    assert optim_cfg.name == "muon", f"unknown optimizer {optim_cfg.name!r}"
    hidden = [(name, parameter) for name, parameter in trained if is_hidden_matrix(name, parameter)]
    rest = [(name, parameter) for name, parameter in trained if not is_hidden_matrix(name, parameter)]
    parts = {}
    if hidden or muon is not None:
        kind = OffloadedMuon if optim_cfg.offload else BatchedMuon
        parts["muon"] = _muon(hidden, optim_cfg, muon or kind)
    if rest:
        parts["adamw"] = adamw(rest, optim_cfg.lr if optim_cfg.adamw_lr is None else optim_cfg.adamw_lr, optim_cfg)
    return Optimizer("muon", parts, rounded)


def _require_device(parameters: Iterable[Parameter]) -> None:
    if any(parameter.device.type == "cpu" for parameter in parameters):
        raise UserError("optim.offload: the model is on the CPU, so there is no GPU memory to save; set it to false")


@torch.no_grad()
def round_masters(parameters: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Round float32 parameters in place to values of `dtype`, to emulate 16-bit master weights.

    Updates smaller than half a rounding step are lost (TRL study, section 2.3). This function exists to show that.
    """
    if dtype == torch.float32:
        return
    for parameter in parameters:
        parameter.copy_(parameter.to(dtype))


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon may update a parameter: a matrix in a numbered block (`model.layers.3.mlp.up_proj.weight`).

    Embeddings, lm_head and the final norm are outside the numbered blocks in every HF causal LM. A router is excluded:
    its rows are one direction per expert, not a map between hidden states.
    """
    return parameter.ndim == 2 and any(part.isdigit() for part in name.split(".")) and not is_router(name)


def adamw(
    named: list[tuple[str, Parameter]], lr: float, optim_cfg: OptimConfig
) -> tuple[torch.optim.Optimizer, list[str]]:
    """Build AdamW with weight decay for matrices only.

    Args:
        named: (name, parameter) pairs.
        lr: Learning rate.
        optim_cfg: The `optim` section.

    Returns:
        The optimizer, and the parameters' names in the order of its groups.
    """
    decayed = [(name, parameter) for name, parameter in named if parameter.ndim >= 2]
    plain = [(name, parameter) for name, parameter in named if parameter.ndim < 2]
    groups = [
        {"params": [parameter for _, parameter in members], "weight_decay": decay, "initial_lr": lr}
        for members, decay in ((decayed, optim_cfg.weight_decay), (plain, 0.0))
        if members
    ]
    options: dict[str, Any] = {"lr": lr, "betas": optim_cfg.betas, "eps": optim_cfg.eps, "fused": True}
    names = [name for name, _ in decayed + plain]
    if not optim_cfg.offload:
        return torch.optim.AdamW(groups, **options), names
    return OffloadedAdamW(groups, **_on_host(optim_cfg), **options), names


def _muon(
    named: list[tuple[str, Parameter]], optim_cfg: OptimConfig, kind: Callable[..., torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer, list[str]]:
    assert optim_cfg.momentum is not None, "validation sets the momentum of muon"
    group = {"params": [parameter for _, parameter in named], "initial_lr": optim_cfg.lr}
    part = kind(
        [group],
        lr=optim_cfg.lr,
        weight_decay=optim_cfg.weight_decay,
        momentum=optim_cfg.momentum,
        adjust_lr_fn="match_rms_adamw",
        **_on_host(optim_cfg),
    )
    return part, [name for name, _ in named]


def _on_host(optim_cfg: OptimConfig) -> dict[str, Any]:
    """Return the additional options of an offloaded optimizer."""
    if not optim_cfg.offload:
        return {}
    return {"masters": optim_cfg.offload == "all", "rounded": DTYPES[optim_cfg.master_dtype]}


def _own(value: Tensor, parameter: Parameter, part: torch.optim.Optimizer) -> Tensor:
    """Return a state tensor for `load_state_dict`: a copy, unless an offloaded optimizer makes one itself."""
    return value if isinstance(part, Offloaded) else value.to(parameter.device, copy=True)


def _parameters(part: torch.optim.Optimizer) -> list[Parameter]:
    return [parameter for group in part.param_groups for parameter in group["params"]]


def lr_at(step: int, total_steps: int, optim_cfg: OptimConfig) -> float:
    """Return the learning rate factor of a training step, which all its optimizer steps share.

    Warm-up rises linearly as (step + 1) / warmup_steps, so the first step has a nonzero learning rate. Then `constant`
    stays at 1; `linear` and `cosine` decay from 1 to min_lr_ratio, reached one step after the last.

    Args:
        step: Training step, counted from 0.
        total_steps: Number of training steps.
        optim_cfg: The `optim` section.
    """
    warmup = optim_cfg.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if optim_cfg.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if optim_cfg.schedule == "linear":
        decay = 1.0 - progress
    else:
        assert optim_cfg.schedule == "cosine", f"unknown schedule {optim_cfg.schedule!r}"
        decay = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim_cfg.min_lr_ratio + (1.0 - optim_cfg.min_lr_ratio) * decay


@torch.no_grad()
def grad_norm(parameters: Iterable[Parameter]) -> float:
    """Return the joint L2 norm of the gradients in float32; 0 without gradients.

    Synchronizes with the GPU once and takes a handful of launches for any number of tensors.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return 0.0
    norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).item()


@torch.no_grad()
def clip_grads(parameters: Iterable[Parameter], norm: float, max_norm: float) -> None:
    """Scale the gradients in place so that their joint norm is at most `max_norm`.

    Args:
        parameters: Parameters; those without a gradient are skipped.
        norm: Joint norm of the gradients, finite.
        max_norm: Upper bound; 0 disables clipping.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if grads and max_norm > 0 and norm > max_norm:
        torch._foreach_mul_(grads, max_norm / norm)
