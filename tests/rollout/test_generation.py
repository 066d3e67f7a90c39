"""A native generation to which responses and new weights are added while it runs."""

from itertools import groupby
from pathlib import Path

import pytest
import torch
from qarl_kernels.truncation import Truncation
from tiny_models import tiny_settings

from qarl.config import Config
from qarl.distributed.ranks import SingleProcess
from qarl.policy.load import load_model, load_tokenizer
from qarl.rollout.asynchronous.groups import Added, OrderLog, PendingGroup, Published
from qarl.rollout.asynchronous.saved_groups import load_groups, prompt_digest, save_groups
from qarl.rollout.engine import SamplingParams
from qarl.rollout.native.engine import Generation, NativeEngine
from qarl.rollout.sequence import Sequence, uniforms
from qarl.training.setup import build_policy
from qarl.types import Prompt

PROMPTS = [Prompt(i, [5 + i, 70, 90 + i, 33], f"prompt {i}") for i in range(3)]
SAMPLING = SamplingParams(n=2, seed=7, max_response_length=40)


class Flight:
    """A policy whose weights change while a generation runs."""

    def __init__(self, model: Path, kv_tokens: int | None = None) -> None:
        more = {} if kv_tokens is None else {"kv_cache_tokens": kv_tokens}
        config = Config.model_validate(tiny_settings(model, rollout={"max_num_seqs": 4, **more}))
        self.policy = build_policy(config, load_model(config.model), torch.device("cpu"))
        self.engine = NativeEngine(self.policy.sampler, load_tokenizer(config.model), config.rollout)
        self.engine.publish(self.policy.current)
        self.kept = {0: self.policy.weights}
        self.generation: Generation = self.engine.begin(SAMPLING, 0, longest=44, sequences=6)
        self.responses: list[Sequence] = []

    def change(self) -> None:
        """Change the master weights and publish them to the sampler while responses are in progress."""
        version = self.policy.version + 1
        self.generation.settle()
        torch.manual_seed(version)
        with torch.no_grad():
            for _, master in self.policy.named_parameters():
                master += 0.05 * master.std() * torch.randn_like(master)
        self.policy.refresh(version)
        self.policy.sampler.install(self.policy.current)
        self.kept[version] = self.policy.weights
        self.generation.version = version

    def run(self, recompute: bool, every: int = 9) -> None:
        """Generate three prompts, the last of which is added later, with new weights every few steps."""
        for prompt in PROMPTS[:2]:
            self.responses += self.generation.add(prompt, range(2), SAMPLING.seed)
        for count in range(1, 400):
            if not self.generation.busy:
                return
            self.generation.step()
            if count == 5:
                self.responses += self.generation.add(PROMPTS[2], range(2), SAMPLING.seed)
            if count % every == 0 and self.policy.version < 4:
                self.change()
                if recompute:
                    self.generation.recompute()
        raise AssertionError("the generation does not end")

    def differing(self) -> int:
        """Tokens whose log-prob is not that of the learner at the version that sampled them."""
        count = 0
        for response in self.responses:
            for version in set(response.versions):
                tokens = [response.prompt.token_ids], [response.response]
                logp, _ = self.policy.logprobs(*tokens, Truncation(), 64, weights=self.kept[version])
                own = torch.tensor([v == version for v in response.versions])
                count += int((logp[own] != torch.tensor(response.logprobs)[own]).sum())
        return count


@pytest.mark.parametrize("kv_tokens", [None, 128], ids=["room", "preemptions"])
def test_recomputed_keys_and_values_make_every_token_exact_at_its_version(tiny_model, kv_tokens):
    flight = Flight(tiny_model("llama"), kv_tokens)
    flight.run(recompute=True)
    assert flight.differing() == 0
    assert flight.policy.version == 4 and len({v for r in flight.responses for v in r.versions}) > 2
    for response in flight.responses:
        assert response.finish_reason is not None and len(response.versions) == len(response.response)
        assert [version for version, _ in groupby(response.versions)] == sorted(set(response.versions))


def test_a_response_resumes_from_its_tokens(tiny_model):
    """As after a restart from a checkpoint: with the same weights it ends as if nothing had happened."""
    whole, half, rest = (Flight(tiny_model("llama")) for _ in range(3))
    whole.responses = whole.generation.add(PROMPTS[0], range(2), SAMPLING.seed)
    while whole.generation.busy:
        whole.generation.step()
    half.responses = half.generation.add(PROMPTS[0], range(2), SAMPLING.seed)
    for _ in range(10):
        half.generation.step()
    half.generation.settle()
    for begun in half.responses:
        points = uniforms(SAMPLING.seed, 0, begun.sample, SAMPLING.max_response_length)
        parts = list(begun.response), list(begun.logprobs), list(begun.versions)
        rest.responses.append(Sequence(begun.prompt, begun.sample, points, *parts))
        rest.generation.resume(rest.responses[-1])
    while rest.generation.busy:
        rest.generation.step()
    assert 0 < len(half.responses[0].response) < len(rest.responses[0].response)
    for one, other in zip(whole.responses, rest.responses, strict=True):
        assert (one.response, one.logprobs, one.text) == (other.response, other.logprobs, other.text)


def test_cancelled_responses_end_and_the_others_do_not_change(tiny_model):
    whole, cut = Flight(tiny_model("llama")), Flight(tiny_model("llama"))
    for flight in (whole, cut):
        flight.responses = [r for p in PROMPTS for r in flight.generation.add(p, range(2), SAMPLING.seed)]
    while whole.generation.busy:
        whole.generation.step()
    for _ in range(5):
        cut.generation.step()
    cut.generation.settle()
    gone = {response for response in cut.responses if response.prompt.id != 1}
    cut.generation.cancel(gone)
    while cut.generation.busy:
        cut.generation.step()
    for one, other in zip(whole.responses, cut.responses, strict=True):
        assert (other.finish_reason is None) == (other in gone)
        if other not in gone:
            assert (one.response, one.logprobs) == (other.response, other.logprobs)


# --- groups in flight ------------------------------------------------------------------------------------------------


def group(number: int, finished: int, partial: bool = False) -> PendingGroup:
    found = PendingGroup(number, 3, 2, PROMPTS[number % 3], 100 + number, 2, 2)
    for sample in range(2, 2 + finished):
        versions = [0, 0, 1] if sample % 2 else [1, 1, 1]
        found.finish(sample, [number, sample, 9], [-0.1, -1e-7, -3.0], "stop", "a\udcff\n", versions, None)
    if partial:
        found.partial[3] = [1, 2], [-0.5, -0.25], [0, 1]
    return found


def test_saved_groups_are_read_back():
    groups = [group(0, 2), group(1, 1, partial=True), group(2, 0)]
    tensors, rows = save_groups(groups)
    found = load_groups(tensors, rows, dict(enumerate(PROMPTS)), 2, SingleProcess())
    assert found == groups and [row["prompt_sha256"] for row in rows] == list(map(prompt_digest, PROMPTS))
    assert [one.complete for one in found] == [True, False, False]
    assert found[1].request().samples == [3] and found[1].request().partial == {3: ([1, 2], [-0.5, -0.25], [0, 1])}
    assert found[0].versions == {0, 1}


def test_a_log_keeps_what_missing_responses_need_and_no_more():
    log, late = OrderLog(), group(4, 1)
    publishes = [Published(version, []) for version in range(3)]
    added = [Added([group(0, 2)]), Added([late]), Added([group(1, 0)])]
    entries = [entry for pair in zip(publishes, added, strict=True) for entry in pair]
    for entry in entries:
        log.append(entry)
    assert [type(e).__name__ for e in log.entries] == ["Published", "Added", "Published", "Added"]
    assert log.versions == {1, 2} and log.last_version == 2
    assert log.repeat(waits=True) == log.entries
    assert [type(e).__name__ for e in log.repeat(waits=False)] == ["Published", "Added", "Added"]
    late.finish(3, [1], [0.0], "stop", "", [1], None)
    log.prune()
    assert log.versions == {2} and len(log.entries) == 2


def test_a_log_forgets_cancelled_groups():
    log, one = OrderLog(), group(4, 1)
    for entry in (Published(0, []), Added([one]), Published(1, [])):
        log.append(entry)
    one.cancelled = True
    log.prune()
    assert log.versions == {1} and len(log.entries) == 1
