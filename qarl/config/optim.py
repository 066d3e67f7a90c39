"""The `optim` section: optimizer, schedule and loss scaling of the FP32 master weights."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from qarl.inputs.limits import FACTOR, LEARNING_RATE, LOSS_SCALE, SMALLEST, STEPS
from qarl.inputs.section import Fault, Field, Section

DYNAMIC_LOSS_SCALE = 65536.0  # initial value, as in torch.amp.GradScaler
Beta = Annotated[float, Field(ge=0, lt=1)]


def _offloaded(value: Any) -> Any:
    """Accept `true` for `moments`: the key was a boolean in earlier versions."""
    return "moments" if value is True else value


class OptimConfig(Section):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "muon"] = Field(
        "adamw",
        description="Optimizer. muon applies to the matrices of the layers, and embeddings, norms, biases and routers "
        "use AdamW. Its updates are scaled by 0.2 sqrt(max(N, K)), to the size of AdamW's.",
    )
    lr: float = Field(1e-6, gt=0, le=LEARNING_RATE, description="Peak learning rate.")
    weight_decay: float = Field(
        0.01, ge=0, le=FACTOR, description="Decoupled weight decay of matrices; norms and biases have none."
    )
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999), strict=False, description="Decay rates of AdamW's first and second moments."
    )
    eps: float = Field(
        1e-8, ge=SMALLEST, le=1, description="Term added to AdamW's denominator for numerical stability."
    )
    momentum: float | None = Field(None, ge=0, lt=1, description="Muon's momentum (default 0.95); null for adamw.")
    adamw_lr: float | None = Field(
        None,
        gt=0,
        le=LEARNING_RATE,
        description="Learning rate of the parameters that muon leaves to AdamW (default lr); null for adamw.",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Learning rate schedule after the warm-up."
    )
    warmup_steps: int = Field(
        0, ge=0, le=STEPS, description="Training steps over which the learning rate rises linearly to its peak."
    )
    min_lr_ratio: float = Field(
        0.0, ge=0, le=1, description="Final learning rate of linear and cosine, as a fraction of the peak."
    )
    max_grad_norm: float = Field(1.0, ge=0, le=FACTOR, description="Maximum global gradient norm; 0 disables clipping.")
    master_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32",
        description="Ablation: train with 16-bit weights. Rounds the master weights to this dtype at the start and "
        "after every optimizer step. Master weights and optimizer state are still stored in float32.",
    )
    offload: Annotated[Literal[False, "moments", "all"], BeforeValidator(_offloaded)] = Field(
        False,
        description="Keep optimizer state in pinned host memory: slower, with identical results. moments (or true): "
        "saves 8 bytes per AdamW parameter and 4 per Muon parameter; all: also the master weights, another 4 bytes per "
        "parameter. GPU only.",
    )
    loss_scale: float | None = Field(
        None,
        ge=SMALLEST,
        le=LOSS_SCALE,
        description="Factor of the loss that keeps float16 gradients from underflowing; gradients are divided by it "
        f"before clipping. Default: 1, or initially {DYNAMIC_LOSS_SCALE:g} if dynamic. Steps that overflow are "
        "skipped.",
    )
    dynamic_loss_scale: bool | None = Field(
        None,
        description="Halve the loss scale after an overflow and double it after 2,000 steps without one, as "
        "torch.amp.GradScaler does. null: true for a float16 learner if loss_scale is null.",
    )

    def faults(self) -> Iterator[Fault]:
        if self.name == "adamw":
            for key in ("momentum", "adamw_lr"):
                if getattr(self, key) is not None:
                    yield self.fault(key, "is read by muon, not by adamw; leave null, or set optim.name: muon")
        if self.schedule == "constant" and self.min_lr_ratio > 0:
            yield self.fault("min_lr_ratio", "has no effect with schedule constant; use linear or cosine, or 0")

    def resolved(self) -> dict[str, Any]:
        if self.name == "adamw":
            return {}
        return {
            "momentum": 0.95 if self.momentum is None else self.momentum,
            "adamw_lr": self.lr if self.adamw_lr is None else self.adamw_lr,
        }
