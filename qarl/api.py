"""qarl from Python: the jobs of the command line as functions that return paths and numbers.

Each function raises `UserError` for mistakes that the user can fix, with one line per mistake; messages name options as
the command line spells them. Importing this module does not import torch; the first call of most functions does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qarl.checks.check import check_run
from qarl.comparison.api import compare as compare
from qarl.comparison.api import compare_offline as compare_offline
from qarl.config.quant import KVCacheDtype
from qarl.config.source import ConfigSource, Overrides, override_texts, read_source
from qarl.distributed.rank_info import rank_info
from qarl.errors import UserError
from qarl.inputs.arguments import checked_arguments
from qarl.inputs.paths import AnyPath, user_path
from qarl.types import Completion, EvaluationResult, Exactness, ExportResult, TrainResult
from qarl.utils.threads import wait_politely

if TYPE_CHECKING:
    from qarl.inference.target import Target

Device = Literal["auto", "cpu", "cuda"]


@checked_arguments
def train(config: ConfigSource, overrides: Overrides = ()) -> TrainResult:
    """Train a policy to its last step, as `qarl train` does. An interrupted run continues from its checkpoint.

    A process that torchrun or the deepspeed launcher started is one rank of the run. `logging.console` selects the
    console output.

    Args:
        config: A YAML file, a dict with its keys, or a `qarl.config.Config`. The run directory is `train.run_dir`;
            default runs/NAME for a file and runs/unnamed for a dict.
        overrides: Values that replace some of `config`, as {"optim.lr": 5e-7} or ["optim.lr=5e-7"].

    Returns:
        Paths and metrics of the run. `finished` is False if a signal (Ctrl-C, SIGTERM, SIGHUP) stopped the run after it
        saved a checkpoint.

    Raises:
        UserError: An error that the user can fix, in the configuration, data or user code.
        qarl.distributed.fault.OtherRankFailed: Another rank of the run failed.
    """
    from qarl.memory.host import expected_device, too_large
    from qarl.storage.names import checkpoint_steps, step_name
    from qarl.storage.runs import EVALUATIONS, METRICS, Evaluation, read_metrics, read_records

    given = read_source(config, overrides)
    loaded = given.config()
    ranks = rank_info()
    count = 1 if ranks is None else ranks.count
    shape = check_run(loaded, count, None, given.place, given.overrides).architecture
    if ranks is None and shape is not None and (fault := too_large(loaded, shape, expected_device(loaded))):
        raise UserError(fault)
    wait_politely()
    from qarl.training.loop import train as run  # torch: only once the configuration is known to be good

    code = run(loaded)
    run_dir = loaded.run_dir
    steps = checkpoint_steps(run_dir / "checkpoints")
    return TrainResult(
        run_dir,
        read_metrics(run_dir / METRICS),
        read_records(run_dir / EVALUATIONS, Evaluation)[0],
        run_dir / "checkpoints" / step_name(steps[-1]) if steps else None,
        code,
    )


@checked_arguments
def sft(config: ConfigSource, overrides: Overrides = ()) -> TrainResult:
    """Train on given responses (supervised fine-tuning), as `qarl sft` does: `train` with `objective.name: sft`.

    For arguments, result and errors see `train`.
    """
    return train(config, ["objective.name=sft", *override_texts(overrides)])


@checked_arguments
def distill(config: ConfigSource, overrides: Overrides = ()) -> TrainResult:
    """Train towards the distribution of `objective.teacher`, as `qarl distill` does: `train` with `objective.name:
    distill`.

    For arguments, result and errors see `train`.
    """
    return train(config, ["objective.name=distill", *override_texts(overrides)])


@checked_arguments
def export(
    run: AnyPath,
    out: AnyPath | None = None,
    *,
    step: int | None = None,
    model: str | None = None,
    dtype: Literal["bf16"] | None = None,
    max_shard_size: str = "5GB",
    unpacked: bool = False,
    for_vllm: bool = True,
    verify: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> ExportResult:
    """Write a run's checkpoint, with its exact codes, in the compressed-tensors format for vLLM and transformers.

    Args:
        run: A run directory, or one of its checkpoints.
        out: A new directory. Default: RUN/export.
        step: Training step of the checkpoint. Default: the newest.
        model: New location of the base model, if it moved.
        dtype: "bf16" exports the master weights, unquantized.
        max_shard_size: Maximum size of the tensors in a file, such as "500MB".
        unpacked: Store int4 codes one per byte.
        for_vllm: Refuse formats that vLLM cannot load. If False, only transformers and qarl have to read the result.
        verify: Load the export with every installed reader and compare it with the run; see `verified` of the result.
        push_to_hub: A model repository on the Hugging Face hub (`user/name`) that gets the export and its card. It is
            created before anything is written, and gets nothing if `verify` finds a difference.
        private: Whether a new repository is private.
        progress: Called with (bytes written, bytes of all tensors).
        say: Called with a status line per reader that `verify` tries.

    Returns:
        Paths, sizes in bytes and digest of the export, and the verification if `verify`.

    Raises:
        UserError: There is no such run or checkpoint, the checkpoint is damaged, or the disk or the hub fails.
    """
    from qarl.exporting.hub import create_repository, push
    from qarl.inference.target import resolve_target

    name = os.fspath(run)
    target = resolve_target(name, step=step, model=model, quant=None if dtype is None else {"scheme": "bf16"})
    if target.run_dir is None:
        kinds = {"export": "is exported already", "model": "is a model, not a run"}
        what = kinds[target.kind] if Path(name).expanduser().exists() else "is not a run directory"
        raise UserError(f"RUN: {name} {what}; give a run directory, or use qarl quantize for a model")
    directory = target.run_dir / "export" if out is None else user_path(out, "OUT")
    repository = None if push_to_hub is None else create_repository(push_to_hub, private)
    written = _write(target, directory, max_shard_size, unpacked, dtype is not None, for_vllm, progress)
    if verify:
        from qarl.exporting.verify import verify_export
        from qarl.terminal.noise import quiet_libraries

        with quiet_libraries(say):
            written = replace(written, verification=verify_export(target, directory, say=say))
    if repository is not None and (written.verified or not verify):
        written = replace(written, pushed=push(repository, written.path, f"Step {target.step} of {target.name}"))
    return written


@checked_arguments
def quantize(
    model: AnyPath,
    out: AnyPath,
    scheme: str,
    *,
    group_size: int | None = None,
    symmetric: bool = True,
    grid: str | None = None,
    ignore: Sequence[str] = (),
    method: str = "rtn",
    calibration: AnyPath | None = None,
    calibration_samples: int | None = None,
    max_shard_size: str = "5GB",
    unpacked: bool = False,
    verify_digests: bool = True,
    for_vllm: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ExportResult:
    """Write a model as a compressed-tensors checkpoint, without training.

    Args:
        model: A directory, a hub name, or package:NAME.
        out: A new directory.
        scheme, group_size, symmetric, grid: As in the configuration's `quant` section.
        ignore: Linear layers to leave unquantized besides lm_head, as `quant.ignore`.
        method: How codes are chosen, as `quant.init`: rtn (nearest code), gptq or awq.
        calibration: Path of a UTF-8 text for gptq and awq. Default: Python's language reference, a part of CPython.
        calibration_samples: Number of windows of 256 tokens from that text. Default: 128.
        verify_digests: If qarl exported the model in bf16, check it against its qarl_export.json.
        max_shard_size, unpacked, for_vllm, progress: See `export`.

    Returns:
        Paths, sizes in bytes and digest of the checkpoint.

    Raises:
        UserError: The model cannot be read, the scheme does not fit a layer, or the disk fails.
    """
    from qarl.inference.target import calibration_keys, given, resolve_target

    quant: dict[str, Any] = {"scheme": scheme, "symmetric": symmetric, "ignore": ["lm_head", *ignore]}
    quant |= given(group_size=group_size, grid=grid) | calibration_keys(method, calibration, calibration_samples)
    name = os.fspath(model)
    if resolve_target(name, verify_digests=verify_digests).kind == "run":
        raise UserError(f"MODEL: {name} is a run; use qarl export, or give the model that it was made from")
    target = resolve_target(name, quant=quant, verify_digests=verify_digests)
    return _write(target, user_path(out, "OUT"), max_shard_size, unpacked, False, for_vllm, progress)


def _write(
    target: Target,
    out: Path,
    max_shard_size: str,
    unpacked: bool,
    unquantized: bool,
    for_vllm: bool,
    progress: Callable[[int, int], None] | None,
) -> ExportResult:
    """Write an export. If `unquantized`, tensors are bfloat16 regardless of the model's compute dtype."""
    from qarl.exporting.staging import require_vacant
    from qarl.storage.shards import parse_size

    max_shard_bytes = parse_size(max_shard_size)
    require_vacant(out)
    wait_politely()
    import torch  # only once the arguments are known to be good

    from qarl.exporting.job import export_target
    from qarl.policy.device import DTYPES
    from qarl.terminal.noise import quiet_libraries

    dtype = torch.bfloat16 if unquantized else DTYPES[target.model.dtype]
    with quiet_libraries(print):
        return export_target(
            target,
            out,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
            unpacked=unpacked,
            for_vllm=for_vllm,
            progress=progress or (lambda done, total: None),
        )


@checked_arguments
def evaluate(
    target: AnyPath,
    data: str | Sequence[str] = (),
    *,
    scheme: str | None = None,
    group_size: int | None = None,
    kv_cache_dtype: KVCacheDtype | None = None,
    samples: int | None = None,
    pass_at: Sequence[int] | None = None,
    temperature: float | None = None,
    chat: bool | None = None,
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_response_length: int | None = None,
    max_prompts: int | None = None,
    seed: int | None = None,
    step: int | None = None,
    model: str | None = None,
    out: AnyPath | None = None,
    device: Device = "auto",
    verify_digests: bool = True,
    console: Literal["rich", "plain", "none"] = "rich",
) -> EvaluationResult:
    """Evaluate a quantized policy: avg@k and pass@k with 95 % intervals.

    The same call resumes an interrupted evaluation.

    Args:
        target: A run, one of its checkpoints, an exported checkpoint, or a model.
        data: One or several evaluation sets, each as NAME, or NAME=PATH for a local file with that set's columns.
            Default: the run's evaluation.tasks, or else its training data.
        scheme, group_size, kv_cache_dtype: Default: the run's own; bf16 for a model.
        samples: Responses per prompt. Default: 4, or 1 if greedy.
        pass_at: Values of k for pass@k. Default: 1 and `samples`.
        temperature: Sampling temperature; 0 is greedy. Default: 1.
        chat: Wrap prompts in the chat template. None: without `data`, as each task says; with `data`, as in training
            for a run or its export, and for other models if the tokenizer has a template.
        system: System message. None: the run's own with `data`, else each task's.
        chat_template_kwargs: Arguments of the chat template, such as {"enable_thinking": False}; None: as for `system`.
        max_response_length: Maximum tokens per response. Default: as configured in the run; 1024 with `data`.
        max_prompts: Use only the first prompts of each set, at most this many.
        seed: Random seed. Default: 0.
        step: Training step of a run's checkpoint. Default: the newest.
        model: New location of a run's base model, if it moved.
        out: Results directory. Default: RUN/eval/... or eval/...
        device: auto, cpu or cuda.
        verify_digests: Check an exported checkpoint against its qarl_export.json.
        console: Console output: rich, plain or none.

    Returns:
        The results and their directory.

    Raises:
        UserError: The target or the data cannot be read, or the options do not fit.
    """
    from qarl.evaluation.request import Request, evaluation_section, prompting
    from qarl.inference.target import given, resolve_target

    quant = given(scheme=scheme, group_size=group_size, kv_cache_dtype=kv_cache_dtype)
    found = resolve_target(os.fspath(target), step=step, quant=quant, model=model, verify_digests=verify_digests)
    ks = None if pass_at is None else tuple(pass_at)
    sets = (data,) if isinstance(data, str) else tuple(data)
    request = Request(
        sets, samples, ks, temperature, max_response_length, max_prompts, seed, chat, system, chat_template_kwargs
    )
    section, notes = evaluation_section(found, request)
    shaped = prompting(found, request)
    wait_politely()
    from qarl.evaluation.evaluate import evaluate_target  # torch: only once the request is known to be good

    where = None if out is None else user_path(out, "--out")
    results, path = evaluate_target(found, section, not data, where, device, notes, console, shaped)
    return EvaluationResult(path, results)


@checked_arguments
def generate(
    target: AnyPath,
    prompts: str | Sequence[str],
    *,
    chat: bool | None = None,
    system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    stop: Sequence[str] | None = None,
    n: int = 1,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    max_new_tokens: int = 128,
    scheme: str | None = None,
    group_size: int | None = None,
    kv_cache_dtype: KVCacheDtype | None = None,
    step: int | None = None,
    model: str | None = None,
    device: Device = "auto",
    verify_digests: bool = True,
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> list[Completion]:
    """Complete prompts with a policy, on the quantized tensors that it is served with.

    Args:
        target: A run, one of its checkpoints, an exported checkpoint, or a model.
        prompts: One prompt, or several.
        chat: Wrap prompts in the chat template. None: as in training for a run or its export; for other models if the
            tokenizer has a template.
        system: System message. None: the run's own.
        chat_template_kwargs: Arguments of the chat template, such as {"enable_thinking": False}; None: the run's own.
        stop: Strings that end a completion, in addition to the model's end of sequence. None: the run's own.
        n: Samples per prompt.
        temperature: Sampling temperature; 0 is greedy.
        top_k, top_p, min_p: Truncation, as in `rollout`; 0, 1 and 0 are off.
        max_new_tokens: Maximum tokens per completion.
        scheme, group_size, kv_cache_dtype: Default: the run's own; bf16 for a model.
        step: Training step of a run's checkpoint. Default: the newest.
        model: New location of a run's base model, if it moved.
        device: auto, cpu or cuda.
        verify_digests: Check an exported checkpoint against its qarl_export.json.
        seed: Random seed.
        say: Called with a status line before slow work.

    Returns:
        The completions, ordered by prompt, then by sample.

    Raises:
        UserError: The target cannot be read, or a prompt does not fit.
    """
    from qarl.inference.target import given, resolve_target

    quant = given(scheme=scheme, group_size=group_size, kv_cache_dtype=kv_cache_dtype)
    found = resolve_target(os.fspath(target), step=step, quant=quant, model=model, verify_digests=verify_digests)
    wait_politely()
    from qarl.inference.generate import GenerateOptions, complete  # torch: only once the target is known

    stops = None if stop is None else tuple(stop)
    options = GenerateOptions(
        chat, system, n, temperature, top_k, top_p, min_p, max_new_tokens, seed, stops, chat_template_kwargs
    )
    return complete(found, [prompts] if isinstance(prompts, str) else list(prompts), options, device, say)


@checked_arguments
def verify_exact(
    target: AnyPath,
    *,
    scheme: str | None = None,
    group_size: int | None = None,
    kv_cache_dtype: KVCacheDtype | None = None,
    engine: Literal["native", "vllm"] = "native",
    tokens: int | None = None,
    longest: int | None = None,
    sequences: int | None = None,
    prompts: AnyPath | Sequence[str] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    step: int | None = None,
    model: str | None = None,
    device: Device = "auto",
    verify_digests: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Exactness:
    """Sample tokens with an engine, recompute their log-probs with the learner's forward, and compare them bit for bit.

    Args:
        target: A run, one of its checkpoints, an exported checkpoint, or a model.
        scheme, group_size, kv_cache_dtype: Default: the run's own; bf16 for a model.
        engine: native, or vllm with exact numerics.
        tokens: Minimum number of tokens to sample. Default: 1,024 on a CPU, 32,768 on CUDA.
        longest: Maximum tokens of a prompt plus its response. Default: 192 on a CPU, 1,024 on CUDA.
        sequences: Maximum concurrent sequences. Default: 6 on a CPU, 48 on CUDA.
        prompts: Texts, or a file with one per line, used as given. None: random tokens.
        temperature, top_k, top_p, min_p: Sampling parameters; 0, 1 and 0 turn the last three off.
        seed: Random seed of prompts and sampling.
        step: Training step of a run's checkpoint. Default: the newest.
        model: New location of a run's base model, if it moved.
        device: auto, cpu or cuda.
        verify_digests: Check an exported checkpoint against its qarl_export.json.
        say: Called with a status line before slow work.

    Returns:
        The result. If a token differs, `first` names it, and the layer and operation at which the two forwards diverge.

    Raises:
        UserError: The target cannot be read, or the engine cannot run exactly here.
    """
    from qarl.inference.target import given, resolve_target

    quant = given(scheme=scheme, group_size=group_size, kv_cache_dtype=kv_cache_dtype)
    found = resolve_target(os.fspath(target), step=step, quant=quant, model=model, verify_digests=verify_digests)
    wait_politely()
    from qarl.exactness.check import check_exactness  # torch: only once the target is known
    from qarl.exactness.request import Request

    request = Request(tokens, longest, sequences, temperature, top_k, top_p, min_p, seed)
    return check_exactness(found, request, engine, prompts, device, say)
