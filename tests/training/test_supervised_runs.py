"""`qarl sft` and `qarl distill`: loss and gradient compared with transformers, whole runs, kills, ranks, held-out."""

import json
from pathlib import Path
from typing import Any

import forked_launch
import pytest
import torch
from pydantic import ValidationError
from run_faults import BY_ENGINE, kill_run, recorded, repeatable
from tiny_runs import Qarl, settings, write_config
from transformers import AutoModelForCausalLM

from qarl.batch.batch import build_batch
from qarl.batch.observer import Observer
from qarl.config import Config
from qarl.distributed.ranks import SingleProcess
from qarl.inference.opening import open_teacher
from qarl.memory.sizes import decide_sizes
from qarl.policy.load import load_model, load_tokenizer
from qarl.terminal.run_console import RunConsole
from qarl.training.held_out import HeldOut
from qarl.training.learner import Learner
from qarl.training.local_engine import GivenResponses
from qarl.training.setup import build_policy, build_sampling
from qarl.training.step import learn
from qarl.training.updates import LocalUpdates
from qarl.types import GivenResponse, Prompt

CPU = torch.device("cpu")
EXACT = {"dtype": "float32"}
ROWS = [
    {"prompt": "one", "completion": "two three"},
    {"prompt": "a longer prompt", "completion": "b"},
    {"messages": None, "prompt": "c", "completion": "d e f g"},
    {"prompt": "hello", "completion": "world and more of it"},
]


def written_data(folder: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    """Write a file of examples."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS))
    return file


def configured(path: Path, data: Path, objective: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run on given responses, without rewards."""
    found = settings(path, data={"source": str(data), "chat_template": False}, objective=objective, **sections)
    del found["reward"]
    found["rollout"] = {"max_response_length": 16, "engine": "data"} | sections.get("rollout", {})
    found["train"] |= {"prompts_per_step": 4, "minibatch_size": 4} | sections.get("train", {})
    return found


# --- one step, beside transformers ---------------------------------------------------------------------------------

EXAMPLES = [
    Prompt(0, [5, 6, 7], "", response=GivenResponse([8, 9, 10, 1])),
    Prompt(1, [11], "", response=GivenResponse([12, 13, 14, 15, 1], [True, False, False, True, True])),
    Prompt(2, [16, 17], "", response=GivenResponse([1])),
]


class Stream:
    def next(self, count: int) -> list[Prompt]:
        return EXAMPLES[:count]


def step_gradient(config: Config) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return metrics and gradient of one minibatch over EXAMPLES, without an update."""
    policy = build_policy(config, load_model(config.model), CPU)
    tokenizer = load_tokenizer(config.model)
    teacher = open_teacher(config, CPU, policy.max_length, RunConsole("none"))
    updates = LocalUpdates(policy, config)
    sampling = build_sampling(config, policy, tokenizer)
    learner = Learner(policy, updates, config, sampling.truncation, SingleProcess(), teacher)
    learner.update = updates.norm  # keeps the gradient
    engine = GivenResponses(config, policy, tokenizer, Stream())
    prompts, rollouts, scores = engine.take(len(EXAMPLES), 0, lambda: None)
    batch = build_batch(prompts, rollouts, scores.total, config.objective.advantage, policy.version, given=True)
    learn(learner, batch, 0, Observer())
    return learner.metrics(batch), {name: p.grad.clone() for name, p in policy.named_parameters()}


def trained_rows(example: Prompt) -> list[int]:
    """Return the positions in prompt and response whose next token is trained on."""
    given = example.response
    written = given.written or [True] * len(given.token_ids)
    return [len(example.token_ids) - 1 + i for i, own in enumerate(written) if own]


def reference_logits(model: torch.nn.Module) -> torch.Tensor:
    """Return the logits (T, V) that predict the trained tokens, from transformers."""
    found = []
    for example in EXAMPLES:
        ids = torch.tensor([example.token_ids + example.response.token_ids])
        found.append(model(ids).logits[0, trained_rows(example)])
    return torch.cat(found)


def targets() -> torch.Tensor:
    found = []
    for example in EXAMPLES:
        ids = example.token_ids + example.response.token_ids
        found += [ids[row + 1] for row in trained_rows(example)]
    return torch.tensor(found)


@pytest.fixture(scope="module")
def models(tiny_model) -> tuple[Path, Path]:
    """A student, and a teacher of another size with the same vocabulary."""
    return tiny_model("llama"), tiny_model("qwen3", hidden_size=32, intermediate_size=64)


def double(path: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def unquantized(path: Path, folder: Path, objective: dict[str, Any], tokens: int) -> Config:
    """Return the configuration of a float32 run without quantization. tokens: Tokens per micro-batch."""
    train = {"prompts_per_step": 3, "minibatch_size": 3, "micro_batch_tokens": tokens}
    quant = {"scheme": "bf16", "group_size": None}
    data = configured(path, written_data(folder), objective, model=EXACT, quant=quant, train=train)
    return decide_sizes(Config.model_validate(data), "cpu")


def compare(found: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and name in found:
            expected = parameter.grad
            scale = expected.abs().max().clamp(min=1e-12)
            assert ((found[name].double() - expected).abs().max() / scale) < 1e-4, name


@pytest.mark.parametrize("tokens", [7, 1000])
def test_sft_has_the_loss_and_gradient_of_transformers_in_float64(models, tmp_path, tokens):
    metrics, gradient = step_gradient(unquantized(models[0], tmp_path, {"name": "sft"}, tokens))
    model = double(models[0])
    loss = torch.nn.functional.cross_entropy(reference_logits(model), targets())
    loss.backward()
    assert metrics["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    compare(gradient, model)


@pytest.mark.parametrize(
    "teacher",
    [{"loss": "forward_kl"}, {"loss": "reverse_kl", "temperature": 2.0}, {"loss": "jsd", "beta": 0.3}],
    ids=str,
)
def test_distillation_has_the_loss_and_gradient_of_float64_transformers(models, tmp_path, teacher):
    objective = {"name": "distill", "teacher": {"path": str(models[1]), "dtype": "float32", **teacher}}
    metrics, gradient = step_gradient(unquantized(models[0], tmp_path, objective, 7))
    model, other = double(models[0]), double(models[1])
    temperature = teacher.get("temperature", 1.0)
    q = (reference_logits(model) / temperature).softmax(-1)
    p = (reference_logits(other) / temperature).softmax(-1).detach()

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * (a.log() - b.log())).sum(-1)

    beta = teacher.get("beta", 0.5)
    m = beta * p + (1 - beta) * q
    value = {"forward_kl": kl(p, q), "reverse_kl": kl(q, p), "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m)}
    loss = value[teacher["loss"]].mean()
    loss.backward()
    assert metrics["teacher/divergence"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["teacher/top1_agreement"] == (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    compare(gradient, model)


def test_held_out_scores_the_quantized_policy(models, tmp_path):
    """In two batches. The reference is transformers in float64 on the dequantized weights."""
    objective = {"name": "distill", "teacher": {"path": str(models[1]), "dtype": "float32"}}
    data = configured(models[0], written_data(tmp_path), objective, model=EXACT, train={"micro_batch_tokens": 7})
    config = decide_sizes(Config.model_validate(data), "cpu")
    policy = build_policy(config, load_model(config.model), CPU)
    teacher = open_teacher(config, CPU, policy.max_length, RunConsole("none"))
    found = HeldOut(EXAMPLES, policy, config, SingleProcess(), teacher).measure()
    model = double(models[0])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if policy.scheme_of(name) is not None:
                weight = policy.current.weight(name.removesuffix(".weight"))
                parameter.copy_(weight.dequantize(torch.float32).double())
        loss = torch.nn.functional.cross_entropy(reference_logits(model), targets()).item()
    assert found["loss"] == pytest.approx(loss, rel=1e-4)
    assert found["tokens"] == len(targets())
    assert found["perplexity"] == pytest.approx(2.718281828459045 ** found["loss"])
    assert found["divergence"] > 0 and 0 <= found["top1_agreement"] <= 1


# --- whole runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(models, tmp_path_factory) -> Path:
    """Write a configuration: W4A16, two optimizer steps per step, and the same rows as held-out examples."""
    folder = tmp_path_factory.mktemp("supervised")
    data = written_data(folder, ROWS * 3)
    sections = configured(models[0], data, {"name": "sft"}, train={"steps": 5, "minibatch_size": 2, "threads": 1})
    sections["evaluation"] = {"held_out": {"source": str(data), "chat_template": False}, "every": 2}
    return write_config(folder / "c.yaml", sections)


def run(qarl: Qarl, command: str, config: Path, name: str, *overrides: str, code: int = 0, **order: Any) -> Path:
    folder = config.parent / name
    done = qarl.run(command, config, f"train.run_dir={folder}", *overrides, cwd=config.parent, **order)
    assert done.code == code, done.err + done.out
    assert name != "whole" or "evaluation.held_out: " in done.out
    return folder


def run_on_ranks(qarl: Qarl, command: str, config: Path, name: str, *overrides: str, before: str = "", **order) -> Path:
    """Like `run`, on two forked ranks that run `before` first."""
    first = config.parent / "first.py"
    first.write_text(before)
    return run(qarl, command, config, name, *overrides, "--nproc", "2", before=forked_launch.before(first), **order)


@pytest.fixture(scope="module")
def whole(qarl, config) -> Path:
    return run(qarl, "sft", config, "whole")


@pytest.mark.slow
def test_sft_learns_is_evaluated_and_repeats_bit_for_bit_after_a_kill(qarl, config, whole):
    losses = [row["sft/loss"] for row in recorded(whole)]
    assert losses[-1] < losses[0] - 0.5
    assert not any(key.startswith(("reward/", "mismatch/")) for key in recorded(whole)[0])
    held = [json.loads(line)["held_out"] for line in (whole / "evaluations.jsonl").read_text().splitlines()]
    assert len(held) == 4 and held[-1]["loss"] < held[0]["loss"] - 0.5  # before, after 2, 4 and 5
    killed = run(qarl, "sft", config, "killed", before=kill_run(3), code=-9)
    assert len(recorded(killed)) == 3
    run(qarl, "sft", config, "killed")
    assert repeatable(killed, BY_ENGINE) == repeatable(whole, BY_ENGINE)


@pytest.mark.slow
def test_a_run_on_two_ranks_differs_by_rounding_only(qarl, config, whole):
    both = run_on_ranks(qarl, "sft", config, "both")
    for one, two in zip(recorded(whole), recorded(both), strict=True):
        assert two["sft/loss"] == pytest.approx(one["sft/loss"], rel=0.05)


@pytest.mark.slow
def test_distillation_on_sampled_responses_needs_no_rewards_and_mismatch_stays_0(qarl, config, models):
    teacher = f"objective.teacher={{path: {models[1]}}}"
    more = "rollout.engine=native", "rollout.n=2", "evaluation.held_out=null", "evaluation.every=null"
    folder = run(qarl, "distill", config, "online", teacher, *more)
    rows = recorded(folder)
    assert all(row["mismatch/delta_abs_max"] == 0 for row in rows)
    assert rows[-1]["teacher/divergence"] < rows[0]["teacher/divergence"]
    assert "reward/mean" not in rows[0]


@pytest.mark.slow
def test_a_teacher_regularizes_an_rl_objective(qarl, llama, tmp_path):
    data = settings(llama, objective={"name": "tbpo", "teacher": {"path": str(llama), "coef": 0.1}}, train={"steps": 2})
    config = write_config(tmp_path / "c.yaml", data)
    rows = recorded(run(qarl, "train", config, "rl"))
    assert rows[0]["teacher/divergence"] > 0 and "reward/mean" in rows[0] and rows[0]["mismatch/delta_abs_max"] == 0


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "sections", "text"),
    [
        ({"name": "sft"}, {"rollout": {"engine": "native"}}, "sft learns from given responses"),
        ({"name": "sft"}, {"rollout": {"temperature": 0.5}}, "the model's own distribution"),
        ({"name": "sft"}, {"correction": {"preset": "tis"}}, "no importance ratio to correct"),
        ({"name": "distill"}, {}, "distill needs a teacher"),
        ({"name": "distill", "teacher": {"path": "x", "coef": 0.0}}, {}, "must be above 0"),
        ({"name": "distill", "teacher": {"path": "x", "loss": "jsd", "top_k": 3}}, {}, "use forward_kl"),
        ({"name": "grpo"}, {"rollout": {"engine": "data", "n": 1}}, "learns from sampled responses"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_that_do_not_fit_are_refused(llama, tmp_path, objective, sections, text):
    data = configured(llama, tmp_path / "rows.jsonl", objective, **sections)
    with pytest.raises(ValidationError, match=text):
        Config.model_validate(data)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a vocabulary of 300", "the teacher has 300 tokens and the student 259"),
        ("rows.jsonl", "objective.teacher.path: rows.jsonl: is a file"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_in_one_line(qarl, config, tiny_model, path, text):
    path = path if "." in path else tiny_model("llama", vocab_size=300)
    done = qarl.run("distill", config, "train.run_dir=lost", f"objective.teacher={{path: {path}}}", cwd=config.parent)
    errors = [line for line in done.err.splitlines() if line.startswith("error")]
    assert done.code == 2 and len(errors) == 1 and text in errors[0]
    assert not (config.parent / "lost").exists()
