"""The engine's contract: order of responses, random streams, stop conditions, text, limits, errors."""

import pytest
import torch

from qarl.batch.batch import build_batch
from qarl.errors import UserError
from qarl.rollout.engine import SamplingParams
from qarl.types import Prompt, Rollout
from qarl.weight_sync.fingerprints import PublishError

PROMPT = Prompt(4, [10, 20, 30], "", {})


@pytest.fixture
def script(monkeypatch, make_engine, tokenizer):
    """script(text or token ids, sampling...) -> the rollout of an engine that draws exactly these tokens."""

    def run(tokens: str | list[int], **sampling) -> Rollout:
        tokens = tokenizer.encode(tokens, add_special_tokens=False) if isinstance(tokens, str) else tokens
        left = iter(tokens)
        monkeypatch.setattr("qarl.rollout.native.plain.sample_tokens", lambda rows, points: torch.tensor([next(left)]))
        params = SamplingParams(**{"n": 1, "seed": 0, "max_response_length": len(tokens)} | sampling)
        return make_engine().generate([PROMPT], params, 0)[0]

    return run


# --- order and streams -------------------------------------------------------------------------------------------


def test_rollouts_come_by_prompt_and_sample(make_engine, prompts):
    rollouts = make_engine(max_num_seqs=3).generate(prompts, SamplingParams(3, 0, 5), 0)
    assert [(r.prompt_id, r.sample) for r in rollouts] == [(p.id, i) for p in prompts for i in range(3)]


def test_samples_of_a_prompt_and_other_seeds_give_other_responses(make_engine):
    engine = make_engine()
    first, second = (engine.generate([PROMPT], SamplingParams(8, seed, 10), 0) for seed in (0, 1))
    assert len({tuple(r.token_ids) for r in first + second}) == 16
    assert (first[0].seed, second[0].seed) == (0, 1)


def test_a_repeated_prompt_gets_the_responses_of_a_larger_group_and_is_two_groups_of_the_batch(make_engine, prompts):
    engine, dealt = make_engine(), [PROMPT, prompts[0], PROMPT]
    rollouts = engine.generate(dealt, SamplingParams(2, 0, 10), 0)
    assert [(r.prompt_id, r.sample) for r in rollouts] == [(4, 0), (4, 1), (10, 0), (10, 1), (4, 2), (4, 3)]
    assert rollouts[:2] + rollouts[4:] == engine.generate([PROMPT], SamplingParams(4, 0, 10), 0)
    batch = build_batch(dealt, rollouts, [1.0, 0.0, 0.5, 0.5, 0.0, 0.0], "grpo_no_std", 0)
    assert batch.groups == [0, 0, 1, 1, 2, 2] and batch.advantages.tolist() == [0.5, -0.5, 0, 0, 0, 0]


def test_progress_ends_with_all_responses_and_tokens(make_engine, prompts):
    seen: list[tuple[int, int]] = []
    rollouts = make_engine().generate(prompts, SamplingParams(2, 0, 5), 0, lambda *counts: seen.append(counts))
    assert seen == sorted(seen) and seen[-1] == (12, sum(len(r.token_ids) for r in rollouts))


# --- stopping and text -------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_response_and_stays_out_of_its_text(script, tokenizer):
    special, ordinary = ([*tokenizer.encode(text, add_special_tokens=False), 50] for text in ("ab", "ab.cd"))
    special.insert(2, 1)
    for tokens in (special, ordinary):
        rollout = script(tokens, stop_token_ids=frozenset({tokens[2]}))
        assert (rollout.token_ids, rollout.finish_reason, rollout.text) == (tokens[:3], "stop", "ab")


def test_without_stop_token_ids_the_end_of_sequence_does_not_end_it(script):
    rollout = script([50, 1, 51, 1, 52])
    assert (len(rollout.token_ids), rollout.finish_reason) == (5, "length")


@pytest.mark.parametrize(
    ("sampled", "stop", "text", "upto"),
    [
        ("answer 4\n\nQ: more", ["\n\nQ:"], "answer 4", "answer 4\n\nQ:"),
        ("one two three", ["three", "wo t", "two"], "one ", "one two"),  # the first of several
        ("xabcy", ["c", "abc"], "x", "xabc"),  # overlapping ones cut at the earlier start
        ("two ≈ € more", ["€"], "two ≈ ", "two ≈ €"),  # of bytes that make one character
        ("abc.", ["."], "abc", "abc."),  # at the length limit
    ],
)
def test_a_stop_string_ends_the_response_and_is_cut_from_its_text(script, sampled, stop, text, upto):
    rollout = script(sampled, stop=tuple(stop))
    assert (rollout.text, rollout.finish_reason) == (text, "stop")
    assert len(rollout.token_ids) == len(rollout.logprobs) == len(upto.encode())


def test_a_response_at_the_length_limit_keeps_its_whole_text(script, tokenizer):
    rollout = script("cut off he", max_response_length=10)
    assert (rollout.text, rollout.finish_reason, len(rollout.token_ids)) == ("cut off he", "length", 10)
    cut_character = tokenizer.encode("a€", add_special_tokens=False)[:-1]
    assert script(cut_character).text == "a\N{REPLACEMENT CHARACTER}"


# --- limits ------------------------------------------------------------------------------------------------------


def test_a_response_past_the_context_is_refused_with_the_keys_to_lower(make_engine, prompts):
    with pytest.raises(UserError, match=r"rollout.max_response_length: .*630 tokens.*512.*data.max_prompt_length"):
        make_engine().generate(prompts, SamplingParams(1, 0, 500), 0)
    (filled,) = make_engine().generate([Prompt(0, [5] * 507, "", {})], SamplingParams(1, 0, 5), 0)
    assert len(filled.token_ids) == 5


def test_a_kv_cache_below_one_sequence_is_refused_with_the_least_that_works(make_engine, prompts):
    sampling = SamplingParams(1, 0, 20)
    with pytest.raises(UserError, match=r"rollout.kv_cache_tokens: 191 .* 150 tokens; set at least 192"):
        make_engine(kv_cache_tokens=191).generate(prompts, sampling, 0)
    assert len(make_engine(kv_cache_tokens=192).generate(prompts, sampling, 0)) == 6


def test_an_empty_prompt_is_refused_by_its_id_and_no_prompts_give_no_rollouts(make_engine):
    with pytest.raises(UserError, match="prompt 9 has no tokens"):
        make_engine().generate([Prompt(9, [], "", {})], SamplingParams(1, 0, 5), 0)
    assert make_engine().generate([], SamplingParams(1, 0, 5), 0) == []


# --- versions and faults -----------------------------------------------------------------------------------------


def test_nothing_is_generated_before_a_publish(make_engine):
    engine = make_engine()
    engine.close()
    with pytest.raises(PublishError, match="nothing was published"):
        engine.generate([PROMPT], SamplingParams(1, 0, 5), 0)


def test_sleep_gives_the_kv_cache_back_and_changes_no_response(make_engine, prompts):
    engine = make_engine()
    before = engine.generate(prompts, SamplingParams(1, 0, 5), 0)
    engine.sleep()
    assert engine._cache is None
    engine.wake()
    assert engine.generate(prompts, SamplingParams(1, 0, 5), 0) == before


def test_logprobs_that_are_not_finite_are_refused_with_the_prompt(make_engine, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine.sampler, "logits", lambda hidden: torch.full((len(hidden), 259), float("nan")))
    with pytest.raises(UserError, match="prompt 4 are not finite at policy version 0"):
        engine.generate([PROMPT], SamplingParams(1, 0, 5), 0)
