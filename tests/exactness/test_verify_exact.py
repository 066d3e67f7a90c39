"""`qarl verify-exact`: equal forwards are exact, and a fault in one forward is found at its layer and operation."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import qarl
from qarl.cli.verify_exact import lines
from qarl.errors import UserError
from qarl.exactness.engines import Native, tight
from qarl.exactness.request import Request, Sizes, rounds, sizes_of
from qarl.exactness.verify import Check
from qarl.inference.opening import Opened, open_policy
from qarl.inference.target import resolve_target
from qarl.policy.policy import Policy
from qarl.policy.sampler import Sampler

SIZES = Sizes(tokens=40, prompt=60, response=12, sequences=6)


@pytest.fixture(scope="module")
def opened(tiny_model) -> Opened:
    target = resolve_target(str(tiny_model("qwen3")), quant={"scheme": "w4a16", "group_size": 32})
    rollout = tight(SIZES).model_copy(update={"kv_cache_tokens": 192})
    return open_policy(target, device="cpu", rollout=rollout, max_length=SIZES.longest)


def checked(opened: Opened, **request) -> Check:
    """One round, traced where it differs."""
    check = Check(opened.policy, Native(opened), "tiny", "native")
    check.take(next(rounds(Request(**request), [], SIZES, opened.policy.config.vocab_size)))
    if check.first is not None:
        check.trace()
    return check


@pytest.mark.parametrize("request_", [{}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}])
def test_what_agrees_is_exact_whatever_is_preempted_and_cut(opened, request_):
    found = checked(opened, **request_).found
    assert found.exact and found.first is None and found.largest == 0.0
    assert found.tokens > found.responses > 0 and found.longest > 64
    assert found.preemptions is not None and found.preemptions > 0


def test_an_fp8_kv_cache_is_exact_and_named(tiny_model):
    target = resolve_target(str(tiny_model("qwen3")), quant={"scheme": "bf16", "kv_cache_dtype": "fp8"})
    assert target.label.endswith(", bf16, FP8 KV cache")
    rollout = tight(SIZES).model_copy(update={"kv_cache_tokens": 192})
    found = checked(open_policy(target, device="cpu", rollout=rollout, max_length=SIZES.longest)).found
    assert found.exact and found.preemptions and found.kv_cache_dtype == "fp8"
    assert lines(found)[0].startswith("tiny, bf16, FP8 KV cache, engine native, ")


# --- faults of the sampler's forward -----------------------------------------------------------------------------


def another_rotation(policy: Policy, caches) -> Any:
    tables = {dtype: (cos, -sin) for dtype, (cos, sin) in policy.decoder.rotary.items()}
    return patch.object(policy.decoder, "rotary", tables)


@contextmanager
def a_damaged_page(policy: Policy, caches) -> Iterator[None]:
    keys, _ = caches[1]
    if keys[0, :, 3].any():  # once something is there
        keys[:, :, 3] = 1.0
    yield


FAULTS = {
    "norm": (lambda policy, caches: patch.object(policy.decoder.layers[1].mlp_norm, "eps", 1e-2), 1, "mlp_norm"),
    "rotation": (another_rotation, 0, "rotary"),
    "last norm": (lambda policy, caches: patch.object(policy.decoder.norm, "eps", 1e-2), None, "final_norm"),
    "KV page": (a_damaged_page, 1, "attention"),
}


@contextmanager
def in_sampler(policy: Policy, monkeypatch, fault: Callable) -> Iterator[None]:
    """Inside, the sampler's forwards have the fault, and the learner's have not."""
    hidden_states, paged, caches = Sampler.hidden_states, Sampler.paged, []

    def seen(self, spans, held):
        caches[:] = held
        return paged(self, spans, held)

    def faulty(self, *arguments, **named):
        with fault(policy, caches):
            return hidden_states(self, *arguments, **named)

    with monkeypatch.context() as during:
        during.setattr(Sampler, "paged", seen)
        during.setattr(Sampler, "hidden_states", faulty)
        yield


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_its_layer_and_operation(opened, monkeypatch, name):
    fault, layer, operation = FAULTS[name]
    with in_sampler(opened.policy, monkeypatch, fault):
        found = checked(opened).found
    first = found.first
    assert not found.exact and 0 < found.differing <= found.tokens and found.largest > 0 and first is not None
    assert (first.layer, first.operation) == (layer, operation), first.place
    assert first.operation_position < first.position and first.note == ""
    assert 0 < first.values_differing <= first.values and first.values_largest > 0
    assert first.place.startswith(operation if layer is None else f"layer {layer}, {operation}")


def test_the_first_token_that_differs_is_named(opened, monkeypatch):
    """In one response of all, and from its fourth token on."""
    engine, victim = Native(opened), 2
    draw = engine.sample

    def altered(one):
        rollouts = draw(one)
        rollouts[victim].logprobs[3] += 0.5
        rollouts[victim].logprobs[5] += 0.25
        return rollouts

    engine.sample = altered
    check = Check(opened.policy, engine, "tiny", "native")
    one = next(rounds(Request(), [], SIZES, opened.policy.config.vocab_size))
    check.take(one)
    found = check.found
    assert found.differing == 2 and found.largest == pytest.approx(0.5)
    prompt, sample = divmod(victim, one.sampling.n)
    tokens = one.prompts[prompt].token_ids
    assert (found.first.prompt, found.first.sample, found.first.token) == (prompt, sample, 3)
    assert found.first.position == len(tokens) + 3
    assert found.first.sampler - found.first.learner == pytest.approx(0.5)

    check.trace()  # which draws without the change: it is in what a trace leaves out, as a CUDA graph is
    assert check.found.first.place is None and "look at the CUDA graphs" in check.found.first.note
    engine.sample = draw
    check.trace()
    assert check.found.first.place is None and check.found.first.note == (
        "sampling again did not differ; the difference is not reproducible"
    )


# --- what is drawn -----------------------------------------------------------------------------------------------


def test_prompts_are_of_one_token_to_the_longest_and_some_begin_alike():
    sizes = Sizes(tokens=4000, prompt=300, response=20, sequences=6)
    one = next(rounds(Request(seed=3), [], sizes, 1000))
    lengths = [len(prompt.token_ids) for prompt in one.prompts]
    assert {1, 63, 64, 65, 300} <= set(lengths) and max(lengths) == 300
    texts = [tuple(prompt.token_ids) for prompt in one.prompts]
    assert any(a[:64] == b[:64] for i, a in enumerate(texts) for b in texts[:i] if min(len(a), len(b)) > 64)
    assert len({prompt.id for prompt in one.prompts}) == len(texts)


def test_the_seed_decides_the_rounds_and_they_differ_from_one_another():
    def first(seed: int, count: int = 4) -> list:
        drawn = rounds(Request(seed=seed), [], SIZES, 259)
        return [next(drawn) for _ in range(count)]

    assert first(1) == first(1) != first(2)
    limits = [one.sampling.max_response_length for one in first(1)]
    assert limits == [12, 6, 3, 12] and len({one.sampling.seed for one in first(1)}) == 4


def test_rounds_take_the_users_prompts_in_turn_and_no_more_than_what_is_left_may_take():
    given, total = [[token] for token in range(5, 12)], [0]
    drawn = rounds(Request(), given, Sizes(tokens=400, prompt=1, response=20, sequences=6), 259, lambda: total[0])
    counts, ids = [], []
    for seen in (0, 330, 399, 10**6):
        total[0] = seen
        one = next(drawn)
        counts.append(len(one.prompts))
        ids += [prompt.token_ids[0] for prompt in one.prompts]
    assert counts == [5, 2, 2, 2]  # of 20, 10, 5 and 20 tokens, four responses each
    assert ids == [5 + i % 7 for i in range(11)]


def test_sizes_follow_the_request_the_prompts_and_the_context():
    assert sizes_of(Request(), [], 4096, "cpu") == Sizes(1024, 96, 96, 6)
    assert sizes_of(Request(), [], 4096, "cuda") == Sizes(32_768, 512, 512, 48)
    assert sizes_of(Request(tokens=7, longest=9, sequences=3), [], 4096, "cpu") == Sizes(7, 4, 5, 3)
    assert sizes_of(Request(), [], 100, "cuda") == Sizes(32_768, 50, 50, 48)
    assert sizes_of(Request(), [[1] * 30, [2]], 4096, "cpu") == Sizes(1024, 30, 96, 6)
    few, many = (tight(Sizes(100_000, 60, 60, count)) for count in (3, 100))
    assert (few.max_num_seqs, many.max_num_seqs) == (3, 100) and few.kv_cache_tokens < many.kv_cache_tokens


@pytest.mark.parametrize(
    ("request_", "given", "says"),
    [
        (Request(longest=200), [], "--longest: 200 is above the model's 100 positions"),
        (Request(longest=20), [[1] * 20], "--prompts: one has 20 tokens.*raise --longest"),
        (Request(), [[1] * 100], "--prompts: one has 100 tokens.*shorten it"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(request_, given, says):
    with pytest.raises(UserError, match=says):
        sizes_of(request_, given, 100, "cpu")


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"longest": 1}, "--longest"),
        ({"sequences": 0}, "--sequences"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"top_k": -1}, "--top-k"),
    ],
)
def test_values_that_mean_nothing_are_refused(values, place):
    with pytest.raises(UserError, match=f"^{place}: "):
        Request(**values).check()


# --- the command -------------------------------------------------------------------------------------------------


def test_the_command_says_that_it_is_exact_and_writes_what_it_found(tiny_model, tmp_path, run_command):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "found.json"
    prompts.write_text("2 + 2 =\n\na longer prompt\n")
    size = ("--tokens", 12, "--longest", 24)
    options = ("--scheme", "w8a8", *size, "--prompts", prompts, "--json", out)
    code, shown, told = run_command("verify-exact", tiny_model(), *options)
    assert code == 0 and shown.splitlines()[-1] == "exact: sampler and learner agree bit for bit"
    assert "w8a8, engine native, CPU (torch " in shown and "opening" in told
    found = json.loads(out.read_text())
    assert found["exact"] is True and found["tokens"] >= 12 and found["differing"] == 0 and found["first"] is None


def test_the_command_names_the_place_with_exit_code_1(tiny_model, tmp_path, run_command, monkeypatch):
    real = Sampler.logits
    monkeypatch.setattr(Sampler, "logits", lambda self, hidden: real(self, hidden) * 1.01)
    out = tmp_path / "found.json"
    size = ("--tokens", 4, "--longest", 8)
    code, shown, _ = run_command("verify-exact", tiny_model(), *size, "--json", out)
    assert code == 1 and "not exact: " in shown
    assert "the forwards diverge at head (the output layer and the log-prob), at position" in shown
    first = json.loads(out.read_text())["first"]
    assert (first["layer"], first["operation"], first["values"]) == (None, "head", None)
    assert first["operation_position"] == first["position"] - 1


def test_a_fault_of_the_user_is_a_line_with_exit_code_2(tiny_model, tmp_path, run_command):
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for arguments, says in [
        (["--prompts", tmp_path / "none.txt"], "error: --prompts: "),
        (["--longest", 10_000], "error: --longest: "),
        (["--temperature", 0], "error: --temperature: "),
        (["--scheme", "w3a3"], "error: "),
    ]:
        code, _, told = run_command("verify-exact", tiny_model(), *arguments)
        assert code == 2 and told.startswith(says) and told.count("\n") <= 2, told


def test_from_python(tiny_model: Callable[..., Path]):
    found = qarl.verify_exact(tiny_model("qwen2"), prompts=["2 + 2 ="], tokens=4, longest=16, device="cpu")
    assert found.exact and found.tokens >= 4 and found.engine == "native" and found.drawn_per_s > 0
    assert torch.__version__ == found.versions["torch"]
