"""A user's own objective: its interface is that of the built-in ones, and each of its faults is one line."""

import math
import re
from pathlib import Path

import pytest
import torch
from objective_sections import objective_config
from ragged import random_batch

from qarl.config import CorrectionConfig
from qarl.errors import UserError
from qarl.objectives.common import finish_stats
from qarl.objectives.objective import build_objective
from qarl.objectives.segments import Totals

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_objective.py"
LENGTHS = [4, 1, 0, 9, 3]
ADVANTAGES = [1.2, -0.7, 0.5, -1.1, 0.0]
TOTALS = Totals(len(LENGTHS), sum(LENGTHS), 16)
NONE = CorrectionConfig()


def custom(path: object, kwargs: dict | None = None, correction: CorrectionConfig = NONE, **keys: object):
    return build_objective(objective_config(name="custom", path=str(path), kwargs=kwargs or {}, **keys), correction)


def evaluated(objective, spread: float = 0.3, infinite: float | None = None):
    """(loss, gradient, metrics) of one batch, whose second token may have a log-prob that is no number."""
    batch = random_batch(LENGTHS, ADVANTAGES, spread)
    if infinite is not None:
        logp = batch.logp.detach().clone()
        logp[1] = infinite
        batch.logp = logp.requires_grad_()
    loss, stats = objective(batch.logps, batch.advantages, batch.segments, TOTALS)
    loss.backward()
    return loss.item(), batch.logp.grad, finish_stats(stats)


def written(tmp_path: Path, body: str, head: str = "def f(inputs):") -> str:
    file = tmp_path / "own.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    file.write_text(f"import math\nimport torch\nfrom qarl.objectives import *\n\n\n{head}\n{lines}")
    return f"{file}:f"


def test_the_example_is_the_formula_of_its_paper():
    high = 0.1
    loss, gradient, metrics = evaluated(custom(f"{EXAMPLE}:cispo", {"clip_ratio_high": high}, aggregation="token-mean"))
    total, weights, expected = 0.0, [], []
    for l, o, _, a in random_batch(LENGTHS, ADVANTAGES, 0.3).responses():  # noqa: E741
        for x, y in zip(l, o, strict=True):
            weights.append(min(math.exp(x - y), 1 + high))
            total += weights[-1] * a * x
            expected.append(-weights[-1] * a / sum(LENGTHS))
    assert loss == pytest.approx(-total / sum(LENGTHS), rel=1e-12)
    assert gradient.tolist() == pytest.approx(expected, rel=1e-12)
    assert metrics["objective/weight_mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-12)
    assert 0 < metrics["policy/clip_frac"] < 1


BUILT_IN = {  # the same objective, written by a user
    "reinforce": "return Surrogate(inputs.token_advantages * inputs.logps.logp)",
    "on_policy": (
        "ratio, clamped = clamped_exp(inputs.log_ratio - inputs.log_ratio.detach())\n"
        "return Surrogate(inputs.token_advantages * ratio)"
    ),
    "sapo": (
        "ratio, clamped = clamped_exp(inputs.log_ratio)\n"
        "a = inputs.token_advantages\n"
        "tau = torch.full_like(a, 1.05).masked_fill(a > 0, 1.0)\n"
        "return Surrogate(a * (tau * (ratio - 1)).sigmoid() * (4 / tau))"
    ),
}


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("correction", [NONE, CorrectionConfig(preset="tis", veto=0.5)], ids=["", "tis"])
def test_a_built_in_objective_written_by_a_user_has_its_loss_and_gradient(tmp_path, name, correction):
    section = objective_config(name=name, kl_coef=0.1)
    keys = {"advantage": section.advantage, "aggregation": section.aggregation, "kl_coef": 0.1}
    loss, gradient, metrics = evaluated(build_objective(section, correction))
    own = custom(written(tmp_path, BUILT_IN[name]), None, correction, **keys)
    own_loss, own_gradient, own_metrics = evaluated(own)
    assert own_loss == loss and torch.equal(own_gradient, gradient)
    assert own_metrics.items() <= metrics.items()


def test_a_class_is_made_once_with_its_kwargs_and_called_with_the_inputs(tmp_path):
    body = (
        "def __init__(self, scale):\n"
        "    self.scale, self.calls = scale, 0\n"
        "def __call__(self, inputs):\n"
        "    self.calls += 1\n"
        "    value = self.scale * inputs.token_advantages * inputs.logps.logp\n"
        "    return Surrogate(value, {'objective/calls': stat(value.new_tensor([self.calls]))})"
    )
    path = written(tmp_path, body, "class f:")
    objective = custom(path, {"scale": 2.0}, aggregation="token-mean")
    once, twice = evaluated(objective), evaluated(objective)
    assert (once[2]["objective/calls"], twice[2]["objective/calls"]) == (1.0, 2.0)
    single = evaluated(custom(path, {"scale": 1.0}, aggregation="token-mean"))
    assert once[0] == 2 * single[0]


def test_a_nan_of_the_learner_reaches_the_loss_and_a_response_of_advantage_zero_is_not_left_out():
    objective = custom(f"{EXAMPLE}:cispo")
    assert math.isnan(evaluated(objective, infinite=math.nan)[0])
    assert not objective.zero_advantage_is_idle


def test_a_machine_without_memory_is_not_the_functions_fault(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        evaluated(custom(written(tmp_path, "raise torch.OutOfMemoryError('CUDA out of memory.')")))


def test_what_is_pruned_is_worth_nothing_whatever_the_function_says(tmp_path):
    path = written(tmp_path, "return Surrogate(inputs.logps.logp * 0 + inputs.log_ratio + 7.0)")
    _, gradient, metrics = evaluated(custom(path), infinite=-math.inf)
    assert gradient[1] == 0.0 and metrics["policy/outside_frac"] == pytest.approx(1 / sum(LENGTHS))


WRONG = {
    "raises": ("raise KeyError('tau')", r"raised KeyError: 'tau' \(own\.py:7\)"),
    "a tensor": ("return inputs.log_ratio", r"returned Tensor, must be a qarl\.objectives\.Surrogate"),
    "whole numbers": ("return Surrogate(inputs.segments.index)", r"is a tensor of torch\.int64, must be a tensor"),
    "a number": ("return Surrogate(inputs.log_ratio.sum())", r"has shape \[\], must be \[17\]: one number per token"),
    "no gradient": ("return Surrogate(inputs.log_ratio.detach())", "its value has no gradient; compute it from inputs"),
    "nan": ("return Surrogate(inputs.log_ratio * math.nan)", "its value is nan at a token of advantage 1.2 and"),
    "a name of qarl's": ("return Surrogate(inputs.log_ratio, {'policy/x': stat(inputs.log_ratio)})", "objective/NAME"),
    "a plain number": ("return Surrogate(inputs.log_ratio, {'objective/x': 3.0})", r"'objective/x': must be made by"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_surrogate_is_one_line_with_file_and_function(tmp_path, name):
    body, says = WRONG[name]
    path = written(tmp_path, body)
    with pytest.raises(UserError, match=f"^objective.path: `{re.escape(path)}`: .*{says}") as caught:
        evaluated(custom(path))
    assert "\n" not in str(caught.value)


UNUSABLE = {
    "no file": ("gone.py:f", "", r"no file `.*gone\.py`"),
    "no python": ("own.py:f", "def f(", "does not import: SyntaxError"),
    "no argument": ("own.py:f", "def f(): ...", r"cannot be called with inputs and objective\.kwargs: .*it takes \(\)"),
    "a class not to call": ("own.py:f", "class f: ...", r"its instances cannot be called; it needs __call__"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_loaded_is_refused_on_one_line_before_anything_is_trained(tmp_path, name):
    reference, source, says = UNUSABLE[name]
    (tmp_path / "own.py").write_text(source)
    path = f"{tmp_path}/{reference}" if ".py" in reference else reference
    with pytest.raises(UserError, match=f"^objective.path: `{re.escape(path)}`: .*{says}") as caught:
        custom(path)
    assert "\n" not in str(caught.value)


def test_an_unknown_keyword_is_refused_with_what_it_takes():
    with pytest.raises(UserError, match=r"unexpected keyword argument 'tau'; it takes \(inputs: .*clip_ratio_high"):
        custom(f"{EXAMPLE}:cispo", {"tau": 1.0})


def test_the_fingerprint_is_of_the_source_the_name_and_the_kwargs_and_not_of_the_place(tmp_path):
    def digests(folder: str, source: str, name: str = "f", **kwargs: float) -> dict[str, str]:
        file = tmp_path / folder / "own.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
        (file.parent / "near.py").write_text("x = 1\n" if folder != "c" else "x = 2\n")
        return objective_config(name="custom", path=f"{file}:{name}", kwargs=kwargs).fingerprint()

    first = digests("a", "import near\n")
    assert list(first) == ["f"] and digests("b", "import near\n") == first
    others = [digests("a", "import near \n"), digests("c", "import near\n"), digests("a", "import near\n", tau=1.0)]
    assert first not in others and digests("a", "import near\n", "g") != first
