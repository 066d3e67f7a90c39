"""Numbers of an offline comparison against float64 transcriptions of their definitions."""

import math
from dataclasses import replace

import pytest
import torch
from qarl_formats.registry import make_scheme
from qarl_formats.weight import quantize_weight
from tokenizers.processors import TemplateProcessing

from qarl.comparison.intervals import mean_interval, t_quantile
from qarl.comparison.offline.divergence import Reference, TokenNumbers, final_states, token_numbers
from qarl.comparison.offline.members import error_of, weight_errors
from qarl.comparison.offline.speed import SpeedTest, engine_speed
from qarl.comparison.offline.windows import Windows, cut, read_text
from qarl.config import RolloutConfig
from qarl.inference.masters import open_masters
from qarl.inference.opening import open_policy
from qarl.inference.target import resolve_target
from qarl.policy.load import load_model, load_tokenizer
from qarl.weight_sync.snapshot import build_snapshot


def opened(path, scheme, dtype="float32", **sizes):
    quant = {"scheme": scheme} | ({"group_size": 32} if scheme.startswith("w4") else {})
    target = resolve_target(str(path), quant=quant)
    target = replace(target, model=target.model.model_copy(update={"dtype": dtype}))
    return open_policy(target, device="cpu", rollout=RolloutConfig(**sizes))


@pytest.fixture(scope="module")
def windows() -> Windows:
    generator = torch.Generator().manual_seed(0)
    return Windows(torch.randint(3, 259, (3, 20), generator=generator).tolist(), 19)


def numbers_of(path, scheme, windows, dtype="float32") -> TokenNumbers:
    plain = opened(path, "bf16", dtype).policy
    reference = Reference(final_states(plain, windows), plain.sampler.weights.head)
    policy = opened(path, scheme, dtype).policy
    return token_numbers(policy, final_states(policy, windows), reference, windows)


def plain_log_probs(model, windows):
    """(windows, 19, V) float64 of the Hugging Face model."""
    with torch.no_grad():
        return model.double()(torch.tensor(windows.ids)).logits[:, :-1].log_softmax(-1)


def test_divergence_and_perplexity_are_those_of_a_float64_model_with_dequantized_weights(tiny_model, windows):
    path = tiny_model("qwen3")
    found = numbers_of(path, "w4a16", windows)
    model = load_model(resolve_target(str(path)).model)
    p = plain_log_probs(model, windows)
    model.float()
    scheme = make_scheme("w4a16", 32)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(quantize_weight(module.weight, scheme, name).dequantize(torch.float32))
    q = plain_log_probs(model, windows)
    following = torch.tensor(windows.ids)[:, 1:, None]
    # The policy multiplies in float32: about 1e-6 of the logits, of order 1.
    torch.testing.assert_close(found.kl, (p.exp() * (p - q)).sum(-1), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found.nll, -q.gather(-1, following)[..., 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.reference_nll, -p.gather(-1, following)[..., 0], rtol=1e-4, atol=1e-5)
    assert torch.equal(found.agrees, p.argmax(-1) == q.argmax(-1))


@pytest.mark.parametrize("scheme", ["bf16", "w4a16", "fp8"])
def test_bf16_diverges_from_itself_by_exactly_zero_and_every_other_scheme_by_more(tiny_model, windows, scheme):
    found = numbers_of(tiny_model(), scheme, windows, "bfloat16")
    assert (found.kl >= 0).all() and (found.kl.mean() > 0) == (scheme != "bf16")
    if scheme == "bf16":
        assert torch.equal(found.kl, torch.zeros_like(found.kl)) and found.agrees.all()
        assert torch.equal(found.nll, found.reference_nll)


def test_windows_do_not_influence_each_other(tiny_model, windows):
    policy = opened(tiny_model(), "w4a8", "bfloat16").policy
    together = final_states(policy, windows)
    alone = final_states(policy, Windows(windows.ids[1:2], windows.predictions))
    assert torch.equal(together[1], alone[0])


def test_the_summary_is_means_over_windows_and_quantiles_over_tokens():
    kl = torch.tensor([[0.1, 0.3], [0.2, 0.6]], dtype=torch.float64)
    nll = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    agrees = torch.tensor([[True, False], [True, True]])
    found = TokenNumbers(kl, nll, nll - 0.5, agrees).summary()
    assert found["kl"]["mean"] == pytest.approx(0.3)
    assert found["kl"]["median"] == pytest.approx(0.25)
    assert found["kl"]["max"] == pytest.approx(0.6)
    half = 12.7062 * 0.1  # Student's t for one degree of freedom, times the standard error of {0.2, 0.4}
    assert found["kl"]["high"] == pytest.approx(0.3 + half, rel=1e-4)
    assert found["kl"]["low"] == 0.0
    assert found["top1_agreement"]["mean"] == pytest.approx(0.75)
    assert found["perplexity"]["mean"] == pytest.approx(math.exp(2.5))
    assert found["perplexity_ratio"] == pytest.approx(dict.fromkeys(("mean", "low", "high"), math.exp(0.5)))


def test_intervals_are_students_t_and_errors_of_trivial_layers_have_no_ratio():
    table = {1: 12.7062, 2: 4.3027, 3: 3.1824, 9: 2.2622, 30: 2.0423, 121: 1.9798}
    assert {freedom: t_quantile(freedom) for freedom in table} == pytest.approx(table, abs=5e-5)
    assert mean_interval([0.5]) == (0.5, None, None)
    weight = torch.tensor([[1.0, -2.0]])
    assert error_of(weight, weight.clone()) == {"relative": 0.0, "sqnr_db": None, "max_abs": 0.0}
    assert error_of(torch.zeros(1, 2), torch.zeros(1, 2)) == {"relative": None, "sqnr_db": None, "max_abs": 0.0}


def test_weight_error_is_that_of_the_tensors_that_run(tiny_model):
    target = resolve_target(str(tiny_model("qwen2")), quant={"scheme": "fp8"})
    masters = open_masters(target)
    snapshot = build_snapshot(0, masters.forms(target.quant, torch.bfloat16))
    rows = list(weight_errors(masters, snapshot))
    assert len(rows) == 14  # seven Linear layers in each of two blocks
    row = next(row for row in rows if row["module"] == "model.layers.1.mlp.down_proj")
    assert (row["layer"], row["kind"]) == (1, "down_proj")
    weight = masters.read("model.layers.1.mlp.down_proj.weight").double()
    stored = snapshot.weights["model.layers.1.mlp.down_proj"].tensors
    lost = weight - (stored["weight"].float() * stored["weight_scale"].float()).double()
    relative = (lost.square().sum() / weight.square().sum()).sqrt().item()
    assert row["relative"] == pytest.approx(relative, rel=1e-6)
    assert row["sqnr_db"] == pytest.approx(-20 * math.log10(relative), rel=1e-6)
    assert row["max_abs"] == pytest.approx(lost.abs().max().item())


def test_the_rates_count_prompt_tokens_and_tokens_after_the_first(tiny_model, monkeypatch):
    test = SpeedTest(batch=2, prompt_tokens=10, new_tokens=4, repeats=3)
    policy = opened(tiny_model(), "bf16", max_num_seqs=2, max_batched_tokens=20)
    ticks = iter(range(1000))
    monkeypatch.setattr("qarl.comparison.offline.speed.synchronized_s", lambda _: float(next(ticks)))
    found = engine_speed(policy, [5, 6, 7], test, seed=0)
    # One tick from the start to the first token of both, three more to the last: 20 / 1 and 6 / 3 a tick.
    assert found["prefill_tokens_per_s"] == {"median": 20.0, "low": 20.0, "high": 20.0}
    assert found["decode_tokens_per_s"] == {"median": 2.0, "low": 2.0, "high": 2.0}


def test_text_is_cut_into_whole_windows_each_with_the_start_token_if_there_is_one(tiny_model, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("abcdefghij")
    tokenizer = load_tokenizer(resolve_target(str(tiny_model())).model)
    found = cut(read_text(file), tokenizer, 4, 9)
    assert [tokenizer.decode(ids) for ids in found.ids] == ["abcd", "efgh"]
    assert found.predictions == 3  # this tokenizer has no start token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    found = cut(read_text(file), tokenizer, 5, 10)
    assert [(ids[0], len(ids)) for ids in found.ids] == [(0, 6), (0, 6)]
    assert found.predictions == 5
