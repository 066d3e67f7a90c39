"""The layers of Triton kernels against those in plain torch: on a GPU if there is one, else in Triton's interpreter."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from fused_models import (
    BOTH,
    DEVICE,
    NEEDS_TRITON,
    ON_GPU,
    PROMPTS,
    RESPONSES,
    SCHEMES,
    TOLERANCE,
    Pairs,
    assert_near,
    backward,
    caches_of,
    gradients,
    logprobs,
)
from policy_models import assert_gradients_close, operand_of, parts_of, tokens
from qarl_formats.bits import same_bits

from qarl.errors import UserError
from qarl.policy.fused_attention import DecodeAttention, PagedAttention
from qarl.policy.pages import Span
from qarl.policy.policy import Policy
from qarl.policy.routes import NO_ROUTES, Balance, Routes
from qarl.policy.starting_codes import hessian_of, starting_masters
from qarl.utils.expert_names import EXPERT_NAMES
from qarl.weight_sync.fingerprints import PublishError, verify_in_process

pytestmark = NEEDS_TRITON
MOE = tuple(EXPERT_NAMES)
ROWS = 3 + 5 + 0 + 5 + 3
GATE, UP = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
W4A16, W8A8 = SCHEMES[1:3]
DENSE = [
    *((*scheme, "qwen3", {"learner": "aligned"}) for scheme in SCHEMES),
    (*W8A8, "qwen3", {"learner": "fake_quant"}),
    ("bf16", None, "qwen3", {"kv_cache_dtype": "fp8"}),
    ("bf16", None, "qwen2", {}),
]
MIXED = [(*W4A16, "mixtral", {}), (*W8A8, "qwen2_moe", {})]
if ON_GPU:
    MIXED += [(*scheme, "mixtral", {}) for scheme in SCHEMES] + [("bf16", None, family, {}) for family in MOE[1:]]
MODES, TWO = ["mlp", "products", "layer"], ("qwen3", "qwen2_moe")
FEW = SCHEMES if ON_GPU else [W8A8]
# w8a8 quantizes anew what it computes again: of one norm for "mlp", of everything for "layer"
RECOMPUTED = [("bf16", "qwen3", mode) for mode in (MODES if ON_GPU else ["products"])]
RECOMPUTED += [("w8a8", family, mode) for family in TWO for mode in MODES][0 if ON_GPU else 5 :]
OWN = [
    *((*scheme, family, {}) for family in TWO[not ON_GPU :] for scheme in FEW),
    ("bf16", None, "qwen3", {"kv_cache_dtype": "fp8"}),
]
PUBLISHED = [*((*scheme, "qwen3") for scheme in SCHEMES), *((*scheme, "qwen2_moe") for scheme in FEW)]


@pytest.fixture(scope="module")
def make(tiny_model) -> Pairs:
    return Pairs(tiny_model)


@pytest.fixture(scope="module")
def kept_gradients() -> Callable[[Policy], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """`gradients` of a policy that keeps all it can, once for all tests."""
    return functools.cache(gradients)


def forward(policy: Policy, replay: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs, and the experts that the routers would choose: (T, L, k)."""
    routes = Routes(replay=replay, own={})
    with torch.no_grad():
        return logprobs(policy, routes=routes), routes.recorded()


@pytest.mark.parametrize(("scheme", "group", "family", "quant"), [*DENSE, *MIXED])
def test_log_probs_and_gradients_agree_with_plain_layers(make, kept_gradients, scheme, group, family, quant) -> None:
    fused, plain = (make(fused, scheme, group, family, **quant) for fused in BOTH)
    ours = theirs = NO_ROUTES
    if family in MOE:  # no near tie is decided otherwise
        ours, theirs = (Routes(replay=forward(plain)[1], own={}) for _ in BOTH)
        (logp, found), (reference, expected) = gradients(fused, routes=ours), gradients(plain, routes=theirs)
        differing = (ours.recorded() != theirs.recorded()).any(-1).float().mean()
        assert differing < 0.2, "the routers choose alike"
    else:
        (logp, found), (reference, expected) = kept_gradients(fused), kept_gradients(plain)
    torch.testing.assert_close(logp, reference, rtol=0, atol=TOLERANCE.get(scheme, 0.3))
    assert_near(found, expected, 0.99 if scheme in TOLERANCE else 0.95)
    if "kv_cache_dtype" in quant:
        unrounded, _ = kept_gradients(make(True, learner="aligned"))
        assert (logp - unrounded).abs().max() > 1e-3


def test_layers_of_one_product_may_differ_in_scheme(make) -> None:
    quant = {"learner": "aligned", "ste_input": "dequantized", "ignore": ["lm_head", GATE]}
    fused, plain = (make(fused, "w8a8", **quant) for fused in BOTH)
    gate, up = fused.weights.linears[fused.decoder.layers[0].gate_up]
    assert [part.weight.scheme for part in (gate, up)] == [
        operand_of(plain.weights, name).scheme for name in (GATE, UP)
    ]
    assert (gate.features, up.features) == (slice(0, 128), slice(128, 256))
    x = torch.randn(3, 64, dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(gate.weight.rounded_input(x), x)
    rounded = up.weight.rounded_input(x)
    assert torch.equal(rounded, operand_of(plain.weights, UP).rounded_input(x)) and not torch.equal(rounded, x)
    (logp, found), (reference, expected) = gradients(fused), gradients(plain)
    torch.testing.assert_close(logp, reference, rtol=0, atol=TOLERANCE["w8a8"])
    assert_near(found, expected, 0.99)


@pytest.mark.parametrize(("scheme", "ste_input"), [("fp8", "dequantized")] + [("bf16", "unquantized")] * ON_GPU)
def test_an_fp8_backward_is_near_the_16_bit_one(make, scheme, ste_input) -> None:
    logp, found = gradients(make(True, scheme, ste_input=ste_input, backward="fp8"))
    same, expected = gradients(make(True, scheme, ste_input=ste_input))
    assert torch.equal(logp, same)
    assert_near(found, expected, 0.98)  # e4m3 errs by 2.6 % of each value


@pytest.mark.parametrize(("scheme", "family", "recompute"), RECOMPUTED)
def test_what_is_computed_again_has_the_same_bits(make, kept_gradients, scheme, family, recompute) -> None:
    policy = make(True, scheme, None, family)
    (logp, kept), (same, again) = kept_gradients(policy), gradients(policy, recompute)
    assert torch.equal(same, logp) and all(torch.equal(again[name], kept[name]) for name in kept)


def test_a_second_backward_adds_to_the_gradients(make, kept_gradients) -> None:
    policy = make(True, learner="aligned")
    _, once = kept_gradients(policy)
    policy.model.zero_grad()
    backward(policy)
    backward(policy)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("scheme", "group", "family", "quant"), OWN)
def test_a_rows_bits_are_its_own_and_the_samplers(make, scheme, group, family, quant) -> None:
    """Alone, with neighbours and with a shared prompt; whole, in chunks and token by token over a KV cache."""
    policy = make(True, scheme, group, family, **quant)
    policy.sampler.install(policy.current)
    with torch.no_grad():
        whole = logprobs(policy)
        alone = torch.cat([logprobs(policy, [p], [r]) for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    assert torch.equal(alone, whole)
    ids = PROMPTS[0] + RESPONSES[2]
    states = policy.sampler.states([ids])
    assert policy.sampler.cache_dtype == (torch.float8_e4m3fn if "kv_cache_dtype" in quant else torch.bfloat16)
    caches, found, start = caches_of(policy), [], 0
    for count in (2, 3, 1, 1):
        attention = policy.sampler.paged([Span(0, count, start, [1])], caches)
        found.append(policy.sampler.hidden_states(torch.tensor(ids[start : start + count], device=DEVICE), attention))
        start += count
    assert torch.equal(torch.cat(found), states)


def strided_caches(policy: Policy, pages: int, page: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per layer two views (pages, H_kv, page, D) of one tensor that has a page's keys and values side by side; NaN."""
    config = policy.config
    shape = (pages, 2, page, config.num_key_value_heads, config.head_dim)
    both = [torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in range(config.num_hidden_layers)]
    return [(cache[:, 0].transpose(1, 2), cache[:, 1].transpose(1, 2)) for cache in both]


@pytest.mark.parametrize("page", [16, 64] if ON_GPU else [16])
def test_tables_on_the_device_give_the_learners_bits(make, page) -> None:
    """A mixed batch of prefill and decode, then decodes beside an empty row whose slot is negative."""
    policy = make(True, learner="aligned")
    policy.sampler.install(policy.current)
    sequences = [tokens(20, 7), tokens(5, 8)]
    first, second = (policy.sampler.states([ids]) for ids in sequences)
    caches = strided_caches(policy, 5, page)
    table = torch.tensor([[3, 1], [2, 999]], dtype=torch.int32, device=DEVICE)

    def states(attention: PagedAttention | DecodeAttention, *ids: int) -> torch.Tensor:
        return policy.sampler.hidden_states(torch.tensor(ids, device=DEVICE), attention)

    def paged(counts: list[int], positions: list[int], slots: torch.Tensor | None = None) -> PagedAttention:
        return PagedAttention.of_tables(np.array(counts), np.array(positions), table, caches, slots)

    found = states(paged([17, 1], [0, 0]), *sequences[0][:17], sequences[1][0])
    assert torch.equal(found, torch.cat([first[:17], second[:1]]))
    given = torch.tensor([3 * page + 17 if page > 17 else page + 1, 2 * page + 1, 2 * page + 2], device=DEVICE)
    found = states(paged([1, 2], [17, 1], given), sequences[0][17], *sequences[1][1:3])
    assert torch.equal(found, torch.cat([first[17:18], second[1:3]]))

    def whole(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    for step, (at, other) in enumerate([(18, 3), (19, 4)]):
        pages = torch.stack([table[0], table[1], table[0]])[[1, 2, 0]]  # the empty row's is another's
        slots = [2 * page + other, -1, 3 * page + at if page > at else page + at - 16]
        positions = whole([other, 0, at], torch.int64)
        attention = DecodeAttention(
            positions, whole(slots, torch.int64), pages, whole([other + 1, 0, at + 1], torch.int32), 32, caches
        )
        found = states(attention, sequences[1][other], 9, sequences[0][at])
        assert torch.equal(found[[0, 2]], torch.cat([second[other : other + 1], first[at : at + 1]])), step
        assert found[1].isfinite().all()


@pytest.mark.parametrize(("scheme", "group", "family"), PUBLISHED)
def test_what_is_published_lies_where_the_products_read_it(make, scheme, group, family) -> None:
    policy, plain = (make(fused, scheme, group, family) for fused in BOTH)
    policy.sampler.install(policy.current)
    held = dict(policy.sampler.held())
    assert held.keys() == policy.current.tensors.keys() == plain.current.tensors.keys()
    for name, tensor in policy.current.tensors.items():
        assert same_bits(held[name], tensor) and same_bits(plain.current.tensors[name], tensor), name


def test_a_code_that_the_product_reads_otherwise_is_found(make) -> None:
    policy = make(True, "w4a8", 32, learner="aligned")
    policy.sampler.install(policy.current)
    verify_in_process(0, policy.current.tensors, policy.sampler.held())
    operand = next(part.weight for part in parts_of(policy.sampler.weights) if len(part.names) > 1)
    assert "weight_packed" not in operand.operands  # the product has the codes in tiles alone
    tiled = operand.operands["weight_tiled"].view(-1).view(torch.uint8)
    tiled[0] ^= 1
    try:
        with pytest.raises(PublishError, match=r"self_attn\.\w+\.weight_packed' differs in the sampler \(bytes\)"):
            verify_in_process(0, policy.current.tensors, policy.sampler.held())
    finally:
        tiled[0] ^= 1


def test_rows_that_fill_a_batch_up_change_nothing_and_stay_within_tables(make, kept_gradients, monkeypatch) -> None:
    policy = make(True, learner="aligned")
    logp, expected = kept_gradients(policy)
    longest = max(len(prompt + response) for prompt, response in zip(PROMPTS, RESPONSES, strict=True))
    tables = policy.decoder.rotary
    held = [torch.cat((table[:longest], torch.full_like(table, torch.nan))) for table in tables[torch.bfloat16]]
    monkeypatch.setitem(tables, torch.bfloat16, tuple(table[:longest] for table in held))  # behind them is NaN
    monkeypatch.setattr(policy, "max_length", longest)
    monkeypatch.setattr("qarl.policy.policy.FEW_ROWS", 0)
    monkeypatch.setattr("qarl.policy.policy.ROWS", 48)
    filled, found = gradients(policy)
    assert torch.equal(filled, logp)
    assert_gradients_close(found, expected, 1e-6)  # float32 sums over more rows, of zeros, in another order


def test_calibration_sees_the_inputs_of_the_layers_in_plain_torch(make, monkeypatch):
    """Codes and scales of w8a8. Roundings choose a few other codes, which later layers see."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(
        "qarl.policy.starting_codes.hessian_of", lambda x: seen.append(x.float().clone()) or hessian_of(x)
    )
    for fused in BOTH:
        policy = make(fused, "w8a8")
        own = dict(policy.named_parameters())
        text = [tokens(7, 1), tokens(5, 2)]  # few rows: the interpreter lacks operations of the product of many
        found = starting_masters(policy, "gptq", text, lambda name, own=own: own[name].detach())
        assert all(master.isfinite().all() for master in found.values())
    ours, plain = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert len(ours) == len(plain) >= 3
    for one, other in zip(ours, plain, strict=True):
        assert (one - other).norm() < 0.1 * other.norm()


def test_one_expert_may_have_every_token_and_routers_have_losses_of_their_own(make) -> None:
    fused, plain = (make(fused, family="mixtral") for fused in BOTH)
    name, layers = "model.layers.0.block_sparse_moe", len(fused.decoder.layers)
    replay = torch.tensor([3, 1], device=DEVICE).expand(ROWS, layers, 2)
    (logp, found), (reference, expected) = (
        gradients(policy, routes=Routes(replay=replay, balance=Balance(3.0, 0.5, slice(ROWS - 4), layers)))
        for policy in (fused, plain)
    )
    torch.testing.assert_close(logp, reference, rtol=0, atol=TOLERANCE["bf16"])
    assert_near(found, expected, 0.99)
    assert not found[f"{name}.experts.0.w1.weight"].any() and found[f"{name}.experts.3.w2.weight"].any()
    _, without = gradients(plain, routes=Routes(replay=replay))
    gate = f"{name}.gate.weight"
    assert (without[gate] - expected[gate]).norm() > 0.3 * expected[gate].norm(), "the losses are a large part of it"


def test_experts_that_are_no_one_weight_are_refused(make) -> None:
    ignored = ["lm_head", "model.layers.0.block_sparse_moe.experts.2.w1"]
    with pytest.raises(UserError, match=r"quant.scheme: w8a8 cannot hold the experts .*quant.kernels: reference"):
        make(True, "w8a8", None, "mixtral", ignore=ignored)
