"""Error of the FP8 backward: its gradient against the 16-bit gradient of the same minibatch and weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.config import Config
from qarl.diagnostics.gradient_passes import CHUNK, LEARNER, Passes
from qarl.policy.decoder import Decoder
from qarl.policy.device import require_fp8_products
from qarl.policy.linear import Backward

Modules = dict[str, tuple[float, float]]
"""Module name -> (cosine, relative error) of its weight's gradient, in layer order."""


@dataclass(frozen=True)
class BackwardError:
    """metrics: The backward/* metrics. modules: Errors of the linear layers with a nonzero 16-bit gradient."""

    metrics: dict[str, float]
    modules: Modules


def backward_error(passes: Passes) -> BackwardError:
    """Compare the FP8 gradient g with the 16-bit gradient h: gradient D of `gradient_passes`, with either backward.

        backward/cosine          of g and h, over all masters
        backward/relative_error  |g - h| / |h|, over all masters
        backward/cosine_min      lowest cosine of any linear layer, over its weight

    Returns no metrics if h is 0. If only g is 0, the cosine is 0. NaN propagates. The policy's backward setting is
    restored afterwards, including after an exception.

    Memory: holds h in float32 on the host, in addition to g.
    """
    policy = passes.policy
    assert policy.weights.fused, "layers in plain torch have no FP8 backward"
    with _backward(policy.decoder, "bf16"):
        exact = [None if gradient is None else gradient.cpu() for gradient in passes.gradients(LEARNER)]
    with _backward(policy.decoder, "fp8"):
        found = passes.gradients(LEARNER)
    names = [name for name, _ in policy.named_parameters()]
    pairs = {n: (g, h) for n, g, h in zip(names, found, exact, strict=True) if g is not None and h is not None}
    if not pairs:
        return BackwardError({}, {})
    rows = torch.stack([_products(g, h) for g, h in pairs.values()]).cpu()  # one transfer from the device
    whole = rows.sum(0)
    if float(whole[2]) == 0.0:
        return BackwardError({}, {})
    linears = {f"{name}.weight": name for name in policy.linears}
    modules = {
        linears[name]: _compared(row)
        for name, row in zip(pairs, rows, strict=True)
        if name in linears and float(row[2]) != 0.0
    }
    cosine, error = _compared(whole)
    metrics = {"backward/cosine": cosine, "backward/relative_error": error}
    if modules:
        metrics["backward/cosine_min"] = modules[worst_module(modules)][0]
    return BackwardError(metrics, modules)


def worst_module(modules: Modules) -> str:
    """Name of the first module with the lowest cosine; NaN counts as lowest."""
    return min(modules, key=lambda name: -math.inf if math.isnan(modules[name][0]) else modules[name][0])


def require_fp8_backward(config: Config, device: torch.device) -> None:
    """Raise UserError if `diagnostics.backward_every` is set and the learner's device has no FP8 products."""
    if not config.diagnostics.backward_every:
        return
    gpu = device if device.type == "cuda" else None
    require_fp8_products("diagnostics.backward_every: an FP8 backward", gpu, "set 0")


@contextmanager
def _backward(decoder: Decoder, backward: Backward) -> Iterator[None]:
    before, decoder.backward = decoder.backward, backward
    try:
        yield
    finally:
        decoder.backward = before


def _products(g: Tensor, h: Tensor) -> Tensor:
    """<g, h>, <g, g>, <h, h> and |g - h|^2 in float64, (4,) on g's device, computed in chunks."""
    total = torch.zeros(4, dtype=torch.float64, device=g.device)
    for x, y in zip(g.reshape(-1).split(CHUNK), h.reshape(-1).split(CHUNK), strict=True):
        a, b = x.double(), y.to(x.device).double()
        products = [torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)]
        b -= a
        total += torch.stack([*products, torch.dot(b, b)])
    return total


def _compared(row: Tensor) -> tuple[float, float]:
    """(cosine, relative error) from the result of `_products`; <h, h> must be nonzero."""
    inner, found, exact, difference = row.tolist()
    cosine = 0.0 if found == 0.0 else inner / (math.sqrt(found) * math.sqrt(exact))
    # not min and max, which would turn NaN into a number
    return math.copysign(1.0, cosine) if abs(cosine) > 1.0 else cosine, math.sqrt(difference / exact)
