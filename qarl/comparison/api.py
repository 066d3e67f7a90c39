"""Comparisons from Python: `qarl.compare` and `qarl.compare_offline`. Imports no torch."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from qarl.config.quant import Init, KVCacheDtype
from qarl.config.source import ConfigSource, Overrides, override_texts, read_source
from qarl.errors import UserError
from qarl.inputs.arguments import checked_arguments
from qarl.inputs.json import read_json_object
from qarl.inputs.paths import AnyPath, user_path
from qarl.types import ComparisonResult
from qarl.utils.threads import wait_politely

OFFLINE_TOKENS = 4096  # tokens of text in an offline comparison
Names = Sequence[str] | str  # a list, or comma-separated as on the command line


@checked_arguments
def compare(
    target: ConfigSource | Sequence[AnyPath],
    overrides: Overrides = (),
    *,
    schemes: Names | None = None,
    learners: Names | None = None,
    seeds: Sequence[int] | str | None = None,
    out: AnyPath | None = None,
    reuse: Sequence[AnyPath] = (),
    profile: str | None = None,
    only: Names | None = None,
    jobs: int | None = None,
) -> ComparisonResult:
    """Compare schemes, learners and seeds of a configuration, the variants of a study, or existing runs.

    The same call resumes an interrupted comparison.

    Args:
        target: A configuration as for `train`, a study file (configs/reproductions), or a list of run directories.
        overrides: Configuration overrides for every member.
        schemes, learners, seeds: Each combination becomes a member. Default: the configuration's own.
        out: Directory for the result. Default: runs/compare-NAME.
        reuse: Directories that are searched for finished runs of the same configuration.
        profile, only: For a study: one of its profiles, and a subset of its variants.
        jobs: Number of members that train concurrently, each in its own process. Default: 1.

    Returns:
        The comparison, and whether all members finished.

    Raises:
        UserError: Invalid arguments, configuration or runs.
    """
    from qarl.comparison.compare import compare_runs, default_out, train_and_compare
    from qarl.comparison.plan import parse_axes, parse_seeds, plan, split_list
    from qarl.comparison.study import is_study, load_study, plan_study

    lists = {"--schemes": _commas(schemes), "--learners": _commas(learners), "--seeds": _commas(seeds)}
    of_study = {"--profile": profile, "--only": _commas(only)}
    given_out = None if out is None else user_path(out, "--out")
    reused = [user_path(path, "--reuse") for path in reuse]
    if isinstance(target, Sequence) and not isinstance(target, str):
        training = {"--reuse": reused or None, "--jobs": jobs}
        refuse(lists | of_study | training, "applies to a CONFIG, not to finished runs; remove it")
        runs = [user_path(path, "compare") for path in target]
        given_out = given_out or default_out(runs)
        return _compared(given_out, compare_runs(runs, given_out))
    if isinstance(target, (str, os.PathLike)) and is_study(os.fspath(target)):
        alone = {name: lists[name] for name in ("--schemes", "--learners")}
        refuse(alone, "a study defines its variants; remove the option, or edit the study")
        chosen = None if of_study["--only"] is None else split_list("--only", of_study["--only"], "a,b")
        numbers = None if lists["--seeds"] is None else parse_seeds(lists["--seeds"])
        file = os.fspath(target)
        study, texts = load_study(file), override_texts(overrides)
        given_out = given_out or default_out([Path(file)])
        members = plan_study(study, file, texts, given_out, profile, chosen, numbers)
        return _compared(given_out, train_and_compare(study.title, members, given_out, reused, jobs or 1, study))
    refuse(of_study, "applies to a study file (see configs/reproductions); remove it")
    axes = parse_axes(*lists.values())
    given = read_source(target, overrides)
    given_out = given_out or default_out([Path(given.place)])
    members = plan(given.place, given.overrides, axes, given_out, given.data)
    return _compared(
        given_out, train_and_compare(f"Comparison of {given.place}", members, given_out, reused, jobs or 1)
    )


@checked_arguments
def compare_offline(
    model: AnyPath,
    schemes: Names,
    *,
    text: AnyPath | None = None,
    group_size: int | None = None,
    kv_cache_dtype: KVCacheDtype | None = None,
    max_tokens: int = OFFLINE_TOKENS,
    out: AnyPath | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    verify_digests: bool = True,
    methods: Names = ("rtn",),
    calibration: AnyPath | None = None,
    calibration_samples: int | None = None,
    trained: Sequence[AnyPath] = (),
) -> ComparisonResult:
    """Compare schemes of a model without RL: weight error, divergence from bf16, perplexity, bytes and speed.

    The same call resumes an interrupted comparison.

    Args:
        model: A run, one of its checkpoints, or a model.
        schemes: Names of schemes.
        text: Path of the UTF-8 text to compare on. Default: a text included in qarl.
        group_size: Group size of w4a16 and w4a8.
        kv_cache_dtype: KV cache dtype of every scheme. Default: as in the run. The bf16 baseline keeps its own dtype.
        max_tokens: Number of tokens to use from the beginning of the text.
        out: Directory for the result. Default: runs/offline-NAME.
        device: auto, cpu or cuda.
        verify_digests: Check an exported checkpoint against its qarl_export.json.
        methods: Values of `quant.init` (rtn, gptq, awq). Each scheme gets one row per method that supports it.
        calibration: Path of a UTF-8 text for gptq and awq. Default: Python's language reference, a part of CPython.
        calibration_samples: Number of windows of 256 tokens from that text. Default: 128.
        trained: Runs, checkpoints or exports that were trained from the model; each gets a row.

    Returns:
        The comparison.

    Raises:
        UserError: Invalid arguments, model or text.
    """
    from qarl_formats.registry import scheme_names

    from qarl.comparison.plan import parse_names

    names = parse_names("--schemes", _commas(schemes) or "", scheme_names())
    chosen = parse_names("--methods", _commas(methods) or "", get_args(Init))
    wait_politely()
    from qarl.comparison.offline.compare_offline import compare_offline as run  # imports torch

    name = os.fspath(model)
    slug = Path(name).name.replace(":", "-")[:100]
    where = Path("runs") / f"offline-{slug}" if out is None else user_path(out, "--out")
    file = None if text is None else user_path(text, "--text")
    code = run(
        name,
        names,
        out=where,
        text=file,
        group_size=group_size,
        kv_cache_dtype=kv_cache_dtype,
        max_tokens=max_tokens,
        device=device,
        verify_digests=verify_digests,
        methods=chosen,
        calibration=None if calibration is None else user_path(calibration, "--calibration"),
        calibration_samples=calibration_samples,
        trained=[os.fspath(path) for path in trained],
    )
    return _compared(where, code)


def refuse(options: dict[str, Any], why: str) -> None:
    """Reject options that do not apply.

    Args:
        options: Name -> value.
        why: Explanation for the error.

    Raises:
        UserError: One of the values is not None.
    """
    for name, value in options.items():
        if value is not None:
            raise UserError(f"{name}: {why}")


def _commas(names: Sequence[object] | str | None) -> str | None:
    return names if names is None or isinstance(names, str) else ",".join(map(str, names))


def _compared(out: Path, code: int) -> ComparisonResult:
    return ComparisonResult(out, read_json_object(out / "comparison.json", nonfinite=True), code)
