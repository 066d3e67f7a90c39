"""`tools/upcycle.py` on a tiny parent: files, equality with the parent without noise, and training of routers."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import upcycle
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from upcycle import Experts, Mlp, cluster, fit, mixture, perturb

from qarl.errors import UserError

SMALL = [
    *("--experts", "4", "--tokens", "512", "--length", "32"),
    "--steps",
    "60",
    "--device",
    "cpu",
]


def run(out: Path, parent: Path, *more: object) -> dict[str, Any]:
    return upcycle.upcycle(upcycle.parse([str(out), "--model", str(parent), *SMALL, *map(str, more)]))


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> SimpleNamespace:
    """A child with noise, in bf16, and what was reported of it."""
    out = tmp_path_factory.mktemp("upcycled") / "child"
    return SimpleNamespace(out=out, parent=tiny_model(), report=run(out, tiny_model(), "--noise", 1))


def test_transformers_reads_every_tensor_and_the_report_counts_them(child: SimpleNamespace) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(child.out, output_loading_info=True)
    assert type(model).__name__ == "MixtralForCausalLM"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == child.report["parameters"]
    assert model.generation_config.eos_token_id == 1
    assert AutoTokenizer.from_pretrained(child.out).chat_template
    assert json.loads((child.out / "upcycling.json").read_text()) == child.report
    found, parent = (load_file(folder / "model.safetensors") for folder in (child.out, child.parent))
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in parent.items() if ".mlp." not in name)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    routed = sum(tensor.numel() for name, tensor in found.items() if ".experts." in name)
    assert child.report["active_parameters"] == child.report["parameters"] - routed // 2  # two of four


def test_one_seed_repeats_byte_for_byte_and_without_noise_the_logits_are_the_parents(
    child: SimpleNamespace, tmp_path: Path
) -> None:
    for name, seed in (("again", 0), ("other", 1)):
        run(tmp_path / name, child.parent, "--noise", 1, "--seed", seed)
    files = [(out / "model.safetensors").read_bytes() for out in (child.out, tmp_path / "again", tmp_path / "other")]
    assert files[0] == files[1] != files[2]
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
    errors = child.report["router_error"]
    assert all(after < before for before, after in zip(errors["before"], errors["after"], strict=True))


def random_experts(generator: torch.Generator) -> tuple[Experts, Tensor, Tensor, Tensor]:
    shapes = ((48, 16), (48, 16), (16, 48))
    dense = Mlp(*(torch.randn(shape, generator=generator) for shape in shapes))
    x = torch.randn(300, 16, generator=generator)
    centers = cluster(x, 3, generator)
    active = dense.features(x)
    return perturb(dense, x, active, centers, 0.5, generator), x, active, centers


def test_errors_give_the_error_of_every_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    experts, x, active, _ = random_experts(generator)
    _, weights, _ = mixture(torch.randn(300, 3, generator=generator), 2)
    wide = [experts.expert(i) for i in range(3)]
    outputs = [Mlp(one.gate.double(), one.up.double(), one.down.double())(x.double()) for one in wide]
    exact = active.double() @ experts.dense.down.double().T
    mixed = sum(weights[:, i, None].double() * output for i, output in enumerate(outputs))
    expected = (mixed - exact).square().sum(1) / exact.var(0, correction=0).sum()
    found = (weights[:, None] @ experts.errors(x, active)).square().sum((1, 2))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)  # float32 differences of float32 sums


def test_an_expert_differs_in_the_features_its_cluster_uses_least() -> None:
    experts, x, active, centers = random_experts(torch.Generator().manual_seed(1))
    nearest = (torch.nn.functional.normalize(x, dim=1) @ centers.T - centers.square().sum(1) / 2).argmax(1)
    used = active.square()
    share = torch.stack([used[nearest == i].mean(0) for i in range(3)])
    share = share / share.sum(0)
    for index in range(3):
        expert = experts.expert(index)
        changed = (expert.gate != experts.dense.gate).any(1)
        assert torch.equal(changed, (expert.down != experts.dense.down).any(0))
        assert changed.sum() == 6  # SHARE of 48
        assert share[index][changed].max() <= share[index][~changed].min() * (1 + 1e-5)


def test_a_router_learns_the_best_experts() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(400, 8, generator=generator)
    right = x[:, 0] > 0  # experts 0 and 1 for these tokens, 2 and 3 for the others
    wrong = torch.stack([~right, ~right, right, right], 1).float()
    first = 0.01 * torch.randn(4, 8, generator=generator)
    found = fit(x, torch.diag_embed(wrong), first, top_k=2, steps=300, generator=generator)
    _, weights, _ = mixture(x @ first.T, 2)
    assert found.before == pytest.approx((weights * wrong).square().sum(1).mean().item())
    assert found.after < 0.2 * found.before
    _, weights, _ = mixture(x @ found.weight.T, 2)
    assert (weights * wrong).sum(1).mean() < 0.2  # 0.5 for a router that knows nothing


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--top-k", "5"], "--top-k: 5 is more than the 4 experts"),
        (["--noise", "nan"], "--noise: nan is not a number from 0"),
        (["--tokens", "16"], "--tokens: 16 are too few for these routers; give at least 128"),
    ],
)
def test_bad_options_are_one_line(more: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit):
        upcycle.parse(["out", *SMALL, *more])
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [("qwen2", {}, "is a qwen2; give one of llama, mistral"), ("llama", {"mlp_bias": True}, "has mlp_bias")],
)
def test_other_parents_are_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path, tiny_model):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "out", tiny_model(family, **changes))


def test_an_existing_directory_stays_as_it_is(tmp_path: Path, child: SimpleNamespace) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(UserError, match="exists and is not empty"):
        run(tmp_path, child.parent)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_an_interrupt_leaves_nothing(tmp_path: Path, child: SimpleNamespace, monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(upcycle, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "new" / "out", child.parent)
    assert not list(tmp_path.iterdir())
