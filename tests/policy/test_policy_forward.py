"""The policy's log-probs and gradients against Hugging Face's own forward and autograd."""

import pytest
import torch
from policy_models import (
    assert_gradients_close,
    batch,
    gradients,
    hf_gradients,
    hf_logprobs,
    load,
    logprobs,
    make_policy,
    put_dequantized,
    tokens,
)

FAMILIES = ["llama", "qwen2", "qwen3"]
FEW = {"prompts": [tokens(5, 1), tokens(70, 2)], "responses": [tokens(9, 4), tokens(3, 5)]}  # one over a page boundary
# float32 through two layers: a few hundred roundings of 6e-8
FP32_GRADIENT = 1e-5


WINDOW = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}  # in the second layer alone


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {"tie_word_embeddings": family != "llama"}) for family in FAMILIES), ("llama", {}), ("qwen2", WINDOW)],
)
def test_unquantized_float32_policy_is_the_hugging_face_model(tiny_model, family: str, changes: dict) -> None:
    directory = tiny_model(family, **changes)
    policy, model = make_policy(directory), load(directory)
    assert changes != WINDOW or policy.config.layer_types == ["full_attention", "sliding_attention"]
    torch.testing.assert_close(logprobs(policy), hf_logprobs(model), rtol=0, atol=1e-4)
    assert_gradients_close(gradients(policy), hf_gradients(model), FP32_GRADIENT)


def test_padding_token_gets_no_gradient_from_its_look_ups(tiny_model) -> None:
    policy = make_policy(tiny_model("qwen3"))  # untied: nothing but look-ups reaches the embedding
    assert policy.decoder.padding_id == 2
    found = gradients(policy, prompts=[[5, 2, 7]], responses=[[9, 2, 11]])["model.embed_tokens.weight"]
    assert not found[2].any() and found[7].any()


@pytest.mark.parametrize(("family", "symmetric"), [*zip(FAMILIES, [True, False, True], strict=True)])
def test_w4a16_policy_is_the_hugging_face_model_with_dequantized_weights(tiny_model, family, symmetric) -> None:
    directory = tiny_model(family)
    policy = make_policy(directory, "w4a16", group_size=32, symmetric=symmetric)
    model = put_dequantized(load(directory), policy)
    torch.testing.assert_close(logprobs(policy, **FEW), hf_logprobs(model, **FEW), rtol=0, atol=1e-4)
    # the straight-through gradient of the master is the dequantized weight's own
    assert_gradients_close(gradients(policy, **FEW), hf_gradients(model, **FEW), FP32_GRADIENT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_float32_in_log_probs_and_gradients(tiny_model, dtype: torch.dtype) -> None:
    half, single = (make_policy(tiny_model("qwen3"), dtype=one) for one in (dtype, torch.float32))
    assert half.current.tensors["model.norm.weight"].dtype == dtype
    assert (logprobs(half, **FEW) - logprobs(single, **FEW)).abs().max() < (0.3 if dtype == torch.bfloat16 else 0.05)
    found = gradients(half, **FEW)
    assert_gradients_close(found, gradients(single, **FEW), 0.05)
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    norm = found["model.norm.weight"]
    assert not torch.equal(norm, norm.to(dtype).float()), "the gradient is not rounded to the compute dtype"


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("bf16", torch.bfloat16), ("bf16", torch.float32), ("w4a16", torch.float32), ("w8a8", torch.bfloat16)],
)
def test_sharing_a_prompt_changes_no_bit_of_the_log_probs(tiny_model, scheme: str, dtype: torch.dtype) -> None:
    policy = make_policy(tiny_model("qwen3"), scheme, dtype, 32 if scheme[:2] == "w4" else None)
    prompts, responses = batch()
    with torch.no_grad():
        together = logprobs(policy)
        alone = [logprobs(policy, [p], [r], chunk=64) for p, r in zip(prompts, responses, strict=True)]
    assert torch.equal(together, torch.cat(alone))


def test_sharing_a_prompt_leaves_the_gradients(tiny_model) -> None:
    policy = make_policy(tiny_model("qwen3"))
    prompts, responses = batch()
    order = [0, 2, 5, 1, 3, 6, 4]  # no two neighbours share a prompt
    separate = {"prompts": [prompts[i] for i in order], "responses": [responses[i] for i in order]}
    expected = {}
    for arguments in ({"prompts": prompts, "responses": responses}, separate):
        policy.model.zero_grad()
        logp = logprobs(policy, **arguments)
        (logp * logp.detach()).sum().backward()
        found = {name: p.grad.clone() for name, p in policy.named_parameters()}
        expected = expected or found
    assert_gradients_close(found, expected, FP32_GRADIENT)


@torch.no_grad()
def test_every_side_of_a_page_boundary_is_right(tiny_model) -> None:
    policy, model = make_policy(tiny_model("llama")), load(tiny_model("llama"))
    lengths = [(prompt, more) for prompt in (1, 63, 64, 65, 128) for more in (1, 2, 3, 64, 65, 66)]
    texts = [tokens(prompt, 1) for prompt, _ in lengths], [tokens(more, more) for _, more in lengths]
    torch.testing.assert_close(logprobs(policy, *texts), hf_logprobs(model, *texts), rtol=0, atol=1e-4)


def test_gradient_checkpointing_gives_equal_log_probs_and_gradients(tiny_model) -> None:
    policy = make_policy(tiny_model("qwen3"), "w4a16", torch.bfloat16, 32)
    plain, plain_gradients = logprobs(policy).detach(), gradients(policy)
    policy.decoder.recompute = "layer"
    assert torch.equal(logprobs(policy).detach(), plain)
    found = gradients(policy)
    assert all(torch.equal(found[name], plain_gradients[name]) for name in found)
