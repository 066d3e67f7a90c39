"""`qarl_kernels.divergence` against float64 autograd, and against torch's own KL."""

import math

import pytest
import torch
from qarl_kernels.divergence import Divergence, token_divergence

CASES = [
    Divergence("forward_kl"),
    Divergence("forward_kl", temperature=2.0),
    Divergence("forward_kl", top_k=3),
    Divergence("reverse_kl", temperature=0.7),
    Divergence("jsd", beta=0.5),
    Divergence("jsd", beta=0.1, temperature=1.5),
]


def oracle(hidden, weight, states, head, case):
    """The definition in float64: materialized logits and torch.nn.functional.kl_div."""
    student, teacher = (hidden @ weight.t()) / case.temperature, (states @ head.t()) / case.temperature
    p = teacher.softmax(-1)
    if case.top_k:
        kept = torch.zeros_like(p).scatter(-1, p.topk(case.top_k).indices, 1.0)
        p = p * kept / (p * kept).sum(-1, keepdim=True)
    q = student.softmax(-1)

    def kl(a, b):
        return torch.nn.functional.kl_div(b.log(), a, reduction="none").sum(-1)

    if case.kind == "forward_kl":
        return kl(p, q)
    if case.kind == "reverse_kl":
        return kl(q, p)
    m = case.beta * p + (1 - case.beta) * q
    return case.beta * kl(p, m) + (1 - case.beta) * kl(q, m)


def problem(rows=11, width=8, teacher_width=5, vocabulary=23, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, width, generator=g),
        torch.randn(vocabulary, width, generator=g),
        torch.randn(rows, teacher_width, generator=g),
        torch.randn(vocabulary, teacher_width, generator=g),
    )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_value_and_gradients_are_those_of_the_definition(case, chunk):
    hidden, weight, states, head = problem()
    scale = torch.linspace(-1.0, 2.0, len(hidden))
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    expected = oracle(*wide, states.double(), head.double(), case)
    (expected * scale.double()).sum().backward()

    narrow, master = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    value, agrees = token_divergence(narrow, master, weight, states, head, case, chunk)
    (value * scale).sum().backward()

    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(narrow.grad.double(), wide[0].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(master.grad.double(), wide[1].grad, rtol=1e-4, atol=1e-5)
    assert agrees.tolist() == ((hidden @ weight.t()).argmax(-1) == (states @ head.t()).argmax(-1)).tolist()


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_equal_distributions_have_no_divergence_and_extreme_ones_a_finite_one(kind):
    hidden, weight, states, head = problem()
    leaf, far = hidden.clone().requires_grad_(), (hidden * 40).requires_grad_()
    value, agrees = token_divergence(leaf, None, weight, hidden, weight, Divergence(kind), 4)
    value.sum().backward()
    assert value.abs().max() < 1e-6 and leaf.grad.abs().max() < 1e-6 and agrees.all()
    value, _ = token_divergence(far, None, weight, -states * 40, head, Divergence(kind), 4)
    value.sum().backward()
    assert value.isfinite().all() and far.grad.isfinite().all()
    assert kind != "jsd" or value.max() <= math.log(2.0) + 1e-5  # the bound of the Jensen-Shannon divergence


def test_a_gradient_buffer_receives_the_weight_gradient():
    hidden, weight, states, head = problem()
    master = weight.clone().requires_grad_()
    buffer = torch.full_like(weight, 3.0)
    leaf = hidden.clone().requires_grad_()
    value, _ = token_divergence(leaf, master, weight, states, head, Divergence(), 4, True, lambda _: buffer)
    value.sum().backward()
    assert master.grad is None
    plain = weight.clone().requires_grad_()
    token_divergence(leaf.detach(), plain, weight, states, head, Divergence(), 4)[0].sum().backward()
    torch.testing.assert_close(buffer - 3.0, plain.grad, rtol=1e-5, atol=1e-5)
