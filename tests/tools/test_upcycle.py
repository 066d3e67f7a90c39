"""`tools/upcycle.py` on a tiny parent: files, equality with the parent without noise, and training of routers."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import upcycle
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from upcycle import cluster, expert_errors, fit, mixture, noisy_experts

from qarl.errors import UserError

SMALL = ["--experts", "4", "--tokens", "512", "--length", "32", "--steps", "60", "--device", "cpu"]


def run(out: Path, parent: Path, *more: object) -> list[tuple[float, float]]:
    return upcycle.upcycle(upcycle.parse([str(out), "--model", str(parent), *SMALL, *map(str, more)]))


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> SimpleNamespace:
    """A child with noise, in bf16, and the errors of its mixtures."""
    out = tmp_path_factory.mktemp("upcycled") / "child"
    return SimpleNamespace(out=out, parent=tiny_model(), errors=run(out, tiny_model(), "--noise", 1))


def test_transformers_reads_every_tensor(child: SimpleNamespace) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(child.out, output_loading_info=True)
    assert type(model).__name__ == "MixtralForCausalLM"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 1
    assert AutoTokenizer.from_pretrained(child.out).chat_template
    found, parent = (load_file(folder / "model.safetensors") for folder in (child.out, child.parent))
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in parent.items() if ".mlp." not in name)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_one_seed_repeats_byte_for_byte_and_without_noise_the_logits_are_the_parents(
    child: SimpleNamespace, tmp_path: Path
) -> None:
    run(tmp_path / "again", child.parent, "--noise", 1)
    files = [(out / "model.safetensors").read_bytes() for out in (child.out, tmp_path / "again")]
    assert files[0] == files[1]
    run(tmp_path / "same", child.parent, "--noise", 0)
    ids = torch.arange(100).view(2, 50)
    with torch.no_grad():
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).float()(ids).logits
            for path in (tmp_path / "same", child.parent)
        )
    # Weights that sum to one, and the products they are multiplied with, are rounded to 24 bits.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_training_lowers_the_error_and_every_expert_is_used(child: SimpleNamespace) -> None:
    ids = torch.randint(259, (4, 32), generator=torch.Generator().manual_seed(0))
    parent, model = (AutoModelForCausalLM.from_pretrained(path).float() for path in (child.parent, child.out))
    with torch.no_grad():
        for layer in model(ids, output_router_logits=True).router_logits:
            shares = mixture(layer, 2)[2].mean(0)
            assert 0 < shares.min() <= shares.max() < 1
        expected, trained = (one(ids).logits.log_softmax(-1) for one in (parent, model))
        for layer in model.model.layers:
            layer.mlp.gate.weight.neg_()
        opposite = model(ids).logits.log_softmax(-1)
    near, far = ((expected.exp() * (expected - found)).sum(-1).mean() for found in (trained, opposite))
    assert 0 < near < far
    assert all(after < before for before, after in child.errors)


def test_an_expert_differs_in_the_features_its_cluster_uses_least(child: SimpleNamespace) -> None:
    generator = torch.Generator().manual_seed(1)
    mlp = AutoModelForCausalLM.from_pretrained(child.parent).float().model.layers[0].mlp
    x = torch.randn(300, 64, generator=generator)
    centers = cluster(x, 3, generator)
    assert expert_errors(mlp, *noisy_experts(mlp, x, centers, 0.0, generator), x).abs().max() < 1e-5
    gate_up, down = noisy_experts(mlp, x, centers, 0.5, generator)
    nearest = (torch.nn.functional.normalize(x, dim=1) @ centers.T - centers.square().sum(1) / 2).argmax(1)
    used = (mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)).square()
    share = torch.stack([used[nearest == i].mean(0) for i in range(3)])
    share = share / share.sum(0)
    for index in range(3):
        changed = (down[index] != mlp.down_proj.weight).any(0)
        gate, up = gate_up[index].chunk(2)
        assert torch.equal(changed, (gate != mlp.gate_proj.weight).any(1))
        assert torch.equal(changed, (up != mlp.up_proj.weight).any(1))
        assert changed.sum() == 16  # SHARE of 128
        assert share[index][changed].max() <= share[index][~changed].min() * (1 + 1e-5)


def test_a_router_learns_the_best_experts() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(400, 8, generator=generator)
    right = x[:, 0] > 0  # experts 0 and 1 for these tokens, 2 and 3 for the others
    wrong = torch.stack([~right, ~right, right, right], 1).float()
    first = 0.01 * torch.randn(4, 8, generator=generator)
    weight, before, after = fit(x, torch.diag_embed(wrong), first, 2, 300, generator)
    _, weights, _ = mixture(x @ first.T, 2)
    assert before == pytest.approx((weights * wrong).square().sum(1).mean().item())
    assert after < 0.2 * before
    _, weights, _ = mixture(x @ weight.T, 2)
    assert torch.allclose(weights.sum(1), torch.ones(400))
    assert (weights * wrong).sum(1).mean() < 0.2  # 0.5 for a router that knows nothing


def test_other_parents_are_refused_and_an_existing_directory_stays(tmp_path: Path, tiny_model) -> None:
    with pytest.raises(UserError, match="cannot represent this qwen2"):
        run(tmp_path / "out", tiny_model("qwen2"))
    with pytest.raises(UserError, match="cannot represent this llama"):
        run(tmp_path / "out", tiny_model("llama", mlp_bias=True))
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(UserError, match="exists and is not empty"):
        run(tmp_path, tiny_model())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
