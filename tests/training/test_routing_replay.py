"""Routing replay and router losses, on a tiny mixture of experts: which choices are replayed, and the gradients."""

from pathlib import Path

import pytest
import torch
from qarl_kernels.logprob import Truncation
from safetensors.torch import save_file
from thread_ranks import as_threads
from tiny_runs import live, parts
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from qarl.batch.batch import build_batch
from qarl.batch.columns import Column
from qarl.batch.saved import read_rollouts, rollout_tensors
from qarl.errors import UserError
from qarl.policy.attention import pack
from qarl.policy.routes import RouterScores, Routes, numbers_of, recording, stored, unknown
from qarl.rollout.shared import gather_rollouts
from qarl.training.routing import RoutingTotals
from qarl.types import Prompt, Rollout

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"prompts_per_step": 2, "minibatch_size": 8, "micro_batch_tokens": 30}


@pytest.fixture(scope="module")
def mixtral(tiny_model) -> Path:
    return tiny_model("mixtral")


def test_replay_changes_no_bit_where_sampler_and_learner_agree(mixtral) -> None:
    found = []
    for routing in ("own", "replay"):
        run = parts(mixtral, model={"routing": routing}, train=SMALL, diagnostics={"routing_every": 1})
        metrics = []
        for step in range(2):
            batch = live(run, seed=step)
            assert batch.replays == (routing == "replay")
            metrics.append(run.learn(batch, step))
            assert all(map(torch.equal, batch.logp_old, batch.logp_sampler))
        assert [m["mismatch/routing_tokens"] for m in metrics] == [0.0, 0.0]
        found.append((metrics, run.policy.current.manifest().digest()))
    assert found[0] == found[1]


def test_the_learner_s_own_experts_are_replayed_in_every_later_forward_of_a_step(mixtral) -> None:
    """They are those of the rollout's weights, in any order and cut of the batch; a single update has the same bits."""
    once = {}
    for routing in ("own", "replay_learner"):
        run = parts(mixtral, model={"routing": routing}, train=SMALL)
        once[routing] = run.learn(live(run)), run.policy.current.manifest().digest()
    assert once["own"] == once["replay_learner"]

    train = {**SMALL, "minibatch_size": 2, "epochs": 2}
    run = parts(mixtral, model={"routing": "replay_learner"}, train=train, optim={"lr": 1e-2})
    batch, used = live(run), []
    logprobs = run.policy.logprobs

    def spy(prompts, responses, *more, **named):
        used.append((prompts, responses, more[-1].replay))
        return logprobs(prompts, responses, *more, **named)

    run.policy.logprobs = spy
    run.learn(batch)
    first = dict.fromkeys(map(tuple, batch.responses))
    fresh = parts(mixtral, train=train)
    routes = recording()
    whole = batch.whole()
    fresh.policy.logprobs(whole.prompts, whole.responses, Truncation(), 64, routes=routes)
    rows = iter(routes.recorded().split([n for own in whole.own_rows for n in (own.prompt, own.response)]))
    prompt = torch.empty(0)
    for response, own in zip(batch.responses, whole.own_rows, strict=True):
        given = next(rows)
        prompt = given if own.prompt else prompt
        first[tuple(response)] = prompt, next(rows)
    replayed = [entry for entry in used if entry[2] is not None]
    assert len(replayed) == len(used) - sum(replay is None for *_, replay in used) and len(replayed) >= 7
    for prompts, responses, replay in replayed:
        expected = []
        for i, (text, response) in enumerate(zip(prompts, responses, strict=True)):
            whole_prompt, rest = first[tuple(response)]
            expected += [*([whole_prompt] if i == 0 or text != prompts[i - 1] else []), rest]
        assert torch.equal(replay.long(), torch.cat(expected).long())


def test_the_router_shift_ratio_is_that_of_the_router_s_own_log_probs(mixtral) -> None:
    """Oracle: log-softmax in float64 of the traced logits, before and after an update, at the experts chosen before."""
    section = {"name": "gmpo", "router_shift_floor": 0.93}
    train = {**SMALL, "minibatch_size": 2, "epochs": 2}
    run = parts(mixtral, objective=section, train=train, optim={"lr": 1e-3})
    batch = live(run)
    whole = batch.whole()

    def log_probs(policy):
        scores = RouterScores()
        logits: list[torch.Tensor] = []
        add = scores.add
        scores.add = lambda layer, x, chosen: (logits.append(x[scores.rows].double()), add(layer, x, chosen))
        policy.logprobs(whole.prompts, whole.responses, Truncation(), 64, routes=Routes(scores=scores))
        experts = [scores.found[layer][0] for layer in sorted(scores.found)]
        return torch.stack([x.log_softmax(-1) for x in logits], 1), torch.stack(experts, 1)  # (T, L, E), (T, L, k)

    old, experts = log_probs(parts(mixtral, train=train).policy)
    metrics = run.learn(batch)
    assert 0 < metrics["router/shift_mean"] < 1 and 0 < metrics["router/shift_floored_frac"] < 1
    with torch.no_grad():
        run.learner.logprobs(whole)
    new, _ = log_probs(run.policy)
    expected = -(new - old).gather(-1, experts).abs().mean((1, 2))
    torch.testing.assert_close(batch.router_shift.read(whole).double(), expected, rtol=1e-4, atol=1e-6)
    assert expected.max() < 0


def test_each_micro_batch_replays_the_rows_of_its_own_responses(mixtral) -> None:
    """One response is sent elsewhere: with a shuffled order and shared prompts, no other one's log-probs change."""
    run = parts(mixtral, model={"routing": "replay"}, train={**SMALL, "minibatch_size": 2})
    batch = live(run)
    assert batch.routing is not None
    prompt = len(batch.prompts[5])
    batch.routing[5] = batch.routing[5].clone()
    batch.routing[5][prompt:] = stored((numbers_of(batch.routing[5][prompt:]) + 1) % 4, 4).sort(-1).values
    for minibatch in batch.minibatches(2, 0, 0, 0):
        for part in run.learner.micro_batches(minibatch):
            assert part.rows == len(pack(part.prompts, part.responses).ids) == len(part.routing)
            with torch.no_grad():
                run.learner.logprobs(part)
    same = [torch.equal(old, drawn) for old, drawn in zip(batch.logp_old, batch.logp_sampler, strict=True)]
    assert same == [i != 5 for i in range(8)]
    # The first token of a response is predicted from its prompt, which is not touched.
    assert batch.logp_old[5][0] == batch.logp_sampler[5][0]
    # What the learner would have chosen itself is measured under replay too.
    metrics = run.learner.totals.routing.metrics()
    assert 0.0 < metrics["mismatch/routing_disagreement"] <= metrics["mismatch/routing_tokens"] < 0.5


@pytest.mark.parametrize(
    ("coefficient", "metric", "routing"),
    [
        ("router_aux_coef", "aux_loss", "replay"),  # its own choices, which have no gradient, would change by leaps
        ("router_z_coef", "z_loss", "own"),
    ],
)
def test_the_gradient_of_a_router_loss_is_that_of_its_metric(mixtral, coefficient, metric, routing) -> None:
    """A small step along the routers' gradient changes the metric by what the gradient says, over micro-batches."""
    run = parts(
        mixtral,
        model={"dtype": "float32", "routing": routing},
        quant={"scheme": "bf16", "group_size": None},
        objective={"name": "grpo", coefficient: 0.5},
        optim={"loss_scale": 64.0},
        train=SMALL,
    )
    batch = run.batch(lambda tokens: 0.0)  # advantages of 0: there is no other gradient
    assert len(run.learner.micro_batches(batch.whole())) > 1
    taken: dict[str, torch.Tensor] = {}
    run.learner.updates.step = lambda norm: taken.update(
        {n: p.grad.clone() for n, p in run.policy.named_parameters() if n.endswith("gate.weight")}
    )
    before = run.learn(batch)[f"router/{metric}"]
    square = sum(float(gradient.double().square().sum()) for gradient in taken.values())
    step = 0.02 / square**0.5
    with torch.no_grad():
        for name, parameter in run.policy.named_parameters():
            if name in taken:
                parameter -= step * taken[name]
    run.policy.refresh(0)
    run.learner.updates.step = lambda norm: None
    batch.logp_old = Column.empty(len(batch))
    after = run.learn(batch)[f"router/{metric}"]
    layers = len(taken)
    assert layers == 2
    # The z-loss is coefficient * sum over layers, its metric the mean; second order leaves a tenth.
    of_metric = 0.5 * (layers if metric == "z_loss" else 1)
    assert of_metric * (before - after) == pytest.approx(step * square, rel=0.1)


CORRECTED = {"level": "token", "signal": "corr", "mode": "truncate", "upper": 2.0, "normalize": True}


@pytest.mark.parametrize(
    ("tokens", "coefficient", "sections"),
    [
        (30, "router_aux_coef", {}),
        # a pass for the objective's constants tells the choices too
        (30, "router_aux_coef", {"correction": CORRECTED, "model": {"routing": "replay"}}),
        (30, "clip_ratio_high", {}),  # responses with advantage 0 have forwards of their own, without a backward
    ],
)
def test_a_prompt_that_several_micro_batches_run_counts_once(mixtral, tokens, coefficient, sections) -> None:
    """Metrics and the routers' gradients are those of a minibatch in one piece, wherever it is cut."""
    metrics = [f"router/{name}" for name in ("aux_loss", "z_loss", "entropy", "load_max")] + ["mismatch/routing_tokens"]
    found = []
    for budget in (10_000, tokens):
        run = parts(
            mixtral,
            model={"dtype": "float32", **sections.get("model", {})},
            quant={"scheme": "bf16", "group_size": None},
            objective={"name": "grpo", coefficient: 0.5},
            correction=sections.get("correction", {}),
            train={**SMALL, "micro_batch_tokens": budget},
            diagnostics={"routing_every": 1},
        )
        batch = run.batch(lambda tokens: 0.0)
        assert batch.routing is not None
        batch.advantages = torch.tensor([0.0, 1.0, -1.0, 0.0] * 2)
        start = len(batch.prompts[0]) if batch.replays else 0  # a prompt that is replayed is one for all its responses
        batch.routing[0] = batch.routing[0].clone()
        batch.routing[0][start:] = stored((numbers_of(batch.routing[0][start:]) + 1) % 4, 4).sort(-1).values
        gradients: list[torch.Tensor] = []
        run.learner.updates.step = lambda norm, own=run.policy, to=gradients: to.extend(
            p.grad.clone() for n, p in own.named_parameters() if n.endswith("gate.weight")
        )
        cut = run.learner.micro_batches(batch.whole())
        told = run.learn(batch)
        assert run.learner.totals.routing.rows == sum(part.counted_rows for part in cut)
        found.append((len(cut), run.learner.totals.routing.rows, [told[m] for m in metrics], gradients))
    (_, rows, alone, expected), (count, same, cut_up, gradients) = found
    assert count > 2 and rows == same
    assert cut_up == pytest.approx(alone, rel=1e-6) and alone[-1] > 0
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-7)  # sums in another order


def test_tokens_that_nobody_knows_choose_for_themselves(mixtral) -> None:
    run = parts(mixtral, model={"routing": "replay"}, train=SMALL)
    batch = live(run)
    assert batch.routing is not None
    batch.routing = [unknown(len(rows), rows) for rows in batch.routing]
    run.learn(batch)
    assert all(map(torch.equal, batch.logp_old, batch.logp_sampler))
    assert "mismatch/routing_tokens" not in run.learner.totals.routing.metrics()  # there was nothing to compare


def test_router_metrics_are_those_of_the_formulas() -> None:
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    chosen = logits.topk(2).indices.sort(-1).values
    routes = Routes(rows=40, loads={})
    totals = RoutingTotals()
    for layer in range(2):
        routes.measure(layer, logits * (layer + 1), chosen)
    totals.add_loads(routes.measured(), 40)
    expected = []
    for layer in range(2):
        real = logits[:40].double() * (layer + 1)
        share = torch.bincount(chosen[:40].flatten(), minlength=6).double() / 80
        entropy = torch.distributions.Categorical(logits=real).entropy().mean()
        expected.append([real.logsumexp(-1).square().mean(), entropy, 6 * share.max()])
    z, entropy, load = torch.tensor(expected).mean(0).tolist()
    aux = load_balancing_loss_func((logits[:40], 2 * logits[:40]), 6, 2).item()
    names = ("router/aux_loss", "router/z_loss", "router/entropy", "router/load_max")
    assert totals.metrics() == pytest.approx(dict(zip(names, (aux, z, entropy, load), strict=True)), rel=1e-6)


def test_disagreement_counts_pairs_and_tokens_that_are_known() -> None:
    sampler = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [0, 3]], [[-1, -1], [-1, -1]], [[1, 2], [0, 1]]])
    learner = torch.tensor([[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [0, 1]], [[1, 2], [0, 2]]])

    def work(ranks):
        totals = RoutingTotals()
        if ranks.count == 1 or ranks.rank != 1:  # one rank has no responses
            part = slice(0, 4) if ranks.count == 1 else slice(ranks.rank, ranks.rank + 2)
            totals.add_choices(sampler[part], learner[part])
        totals.add_up(ranks)
        return totals.metrics()

    alone = work(as_threads(1, lambda ranks: ranks)[0])
    assert alone == {"mismatch/routing_disagreement": 0.5, "mismatch/routing_tokens": pytest.approx(2 / 3)}
    first, *others = as_threads(3, work)
    assert others == [first, first] and first["mismatch/routing_tokens"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("experts", "dtype"), [(8, torch.uint8), (255, torch.uint8), (256, torch.int16)])
def test_numbers_of_experts_are_stored_and_read_back(experts: int, dtype: torch.dtype) -> None:
    numbers = torch.tensor([[[0, experts - 1]], [[-1, -1]]])
    found = stored(numbers, experts)
    assert found.dtype == dtype and torch.equal(numbers_of(found).long(), numbers)
    assert torch.equal(found[1:], unknown(1, found))


def rollout(number: int, routing: torch.Tensor | None) -> Rollout:
    written = [True, number > 0, True]
    return Rollout(number, 0, [5, 6, 7], [-1.0, -2.0, -3.0], "stop", 0, 1, "", routing, written=written)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_ranks_have_each_others_routing_and_marks(dtype: torch.dtype) -> None:
    rows = [torch.randint(0, 99, (3 + n, 2, 2), dtype=dtype) for n in range(3)]

    def work(ranks):
        own = {0: [rollout(0, rows[0]), rollout(1, rows[1])], 1: [], 2: [rollout(2, rows[2])]}[ranks.rank]
        return gather_rollouts(own, ranks)

    for found in as_threads(3, work):
        assert [(r.prompt_id, r.written) for r in found] == [(n, [True, n > 0, True]) for n in range(3)]
        assert all(r.routing.dtype == dtype and torch.equal(r.routing, own) for r, own in zip(found, rows, strict=True))


def test_a_sampler_that_recorded_no_experts_is_refused() -> None:
    prompt = Prompt(0, [1, 2], "", {})
    with pytest.raises(UserError, match=r"model.routing: the sampler recorded the experts of 0 of 1 responses"):
        build_batch([prompt], [rollout(0, None)], [0.0], "reinforce", 0, replays=True)


def test_a_saved_step_keeps_its_routing(mixtral, tmp_path: Path) -> None:
    run = parts(mixtral, model={"routing": "replay"}, train=SMALL)
    batch = live(run)
    batch.logp_old = batch.logp = batch.logp_sampler
    tensors, path = rollout_tensors(batch, [0.0] * len(batch)), tmp_path / "rollouts" / "000001.safetensors"
    path.parent.mkdir()
    save_file(tensors, path)
    found = read_rollouts(tmp_path, 1)
    assert found.routing is not None and all(map(torch.equal, found.routing, batch.routing))
    save_file(tensors | {"routing": tensors["routing"][1:].contiguous()}, path)
    with pytest.raises(UserError, match="routing is uint8"):
        read_rollouts(tmp_path, 1)
