"""The router, and the sums over slots, in plain torch: the CPU path and the reference of the kernels.

The products of experts are in `Scheme.matmul`, which loops over the experts in plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qarl_kernels.groups import Groups, Routed, Shared
from qarl_kernels.integers import next_power_of_2
from qarl_kernels.reference import matmul


def probabilities(logits: Tensor) -> Tensor:
    """Softmax of each row of float32 (T, E), with a pairwise tree sum, as in the kernel."""
    exponentials = (logits - logits.amax(1, keepdim=True)).exp()
    total = torch.nn.functional.pad(exponentials, (0, next_power_of_2(logits.shape[1]) - logits.shape[1]))
    while total.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
    return exponentials / total


def route(x: Tensor, weight: Tensor, k: int, normalize: bool, chosen: Tensor | None) -> Routed:
    """Definition of `qarl_kernels.moe.routing.route`; also takes float32."""
    wide, wide_weight = x.float(), weight.float().contiguous()
    logits = matmul(wide, wide_weight)
    if chosen is None:
        comparable = logits.masked_fill(logits.isnan(), -torch.inf)  # a NaN would be the largest
        chosen = comparable.sort(dim=1, descending=True, stable=True).indices[:, :k]
    experts = chosen.long().clamp(0, weight.shape[0] - 1).sort(dim=1).values
    weights = probabilities(logits).gather(1, experts)
    if normalize:
        total = weights[:, 0]
        for slot in range(1, k):
            total = total + weights[:, slot]
        weights = weights / total[:, None]
    return Routed(logits, experts.int(), weights)


def route_backward(grad_weights: Tensor, routed: Routed, normalize: bool) -> Tensor:
    """Definition of `qarl_kernels.moe.routing.route_backward`."""
    experts = routed.experts.long()
    inner = (grad_weights * routed.weights).sum(1, keepdim=True)
    zeros = torch.zeros_like(routed.logits)
    if normalize:  # the other experts' probabilities cancel
        return zeros.scatter_add(1, experts, routed.weights * (grad_weights - inner))
    return probabilities(routed.logits) * (zeros.scatter_add(1, experts, grad_weights) - inner)


def groups_of(experts: Tensor, count: int) -> Groups:
    """Definition of `qarl_kernels.moe.dispatch.groups_of`: a stable sort."""
    ordered, order = torch.sort(experts.flatten().clamp(0, count - 1), stable=True)
    rows = torch.arange(order.shape[0], dtype=torch.int32, device=experts.device)
    place = torch.empty_like(rows).scatter_(0, order, rows)
    bounds = torch.arange(count + 1, dtype=ordered.dtype, device=experts.device)
    starts = torch.searchsorted(ordered, bounds, out_int32=True)
    return Groups(count, experts.shape[1], order.to(torch.int32), place, starts)


def combine(d: Tensor, weights: Tensor, groups: Groups, shared: Shared | None = None) -> Tensor:
    """Definition of `qarl_kernels.moe.combine.combine`; also takes float32."""
    added = None if shared is None else shared.output.float() * shared.gate[:, None]
    return _sum(d, weights, groups, added)


def sum_over_slots(grad: Tensor, groups: Groups, added: Tensor | None) -> Tensor:
    """Definition of `qarl_kernels.moe.combine.sum_over_slots`; also takes float32."""
    return _sum(grad, torch.ones_like(groups.place, dtype=torch.float32).view(-1, groups.slots), groups, added)


def _sum(d: Tensor, weights: Tensor, groups: Groups, added: Tensor | None) -> Tensor:
    place = groups.place.view(-1, groups.slots).long()
    total = d[place[:, 0]].float() * weights[:, :1]
    for slot in range(1, groups.slots):
        total = total + d[place[:, slot]].float() * weights[:, slot : slot + 1]
    return (total if added is None else total + added.float()).to(d.dtype)


def shared_gate(x: Tensor, weight: Tensor) -> Tensor:
    """Definition of `qarl_kernels.moe.shared.shared_gate`; also takes float32."""
    logit = (x.float() * weight.float()).sum(1)  # not a matrix product, whose bits depend on the number of rows
    return logit.neg_().exp_().add_(1.0).reciprocal_()


def combine_backward(dy: Tensor, d: Tensor, weights: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Definition of `qarl_kernels.moe.combine.combine_backward`; also takes float32."""
    order, place = groups.order.long(), groups.place.long()
    output_grad = dy[order // groups.slots].float()
    grad_weights = (output_grad * d.float()).sum(1)[place].view(-1, groups.slots)
    return (output_grad * weights.flatten()[order][:, None]).to(d.dtype), grad_weights


def shared_backward(dy: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """Definition of `qarl_kernels.moe.combine.shared_backward`; also takes float32."""
    wide, gate = dy.float(), shared.gate
    grad_gate = (wide * shared.output.float()).sum(1)
    return (wide * gate[:, None]).to(shared.output.dtype), grad_gate * (gate * (1.0 - gate))
