"""Resolve what a user names on the command line: a run, one of its checkpoints, an exported checkpoint, or a model."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from qarl_formats.checkpoints import CheckpointFormat, CompressedTensors
from qarl_formats.checkpoints.base import FLOATS
from qarl_formats.registry import scheme_class, scheme_names
from qarl_formats.scheme import Scheme

from qarl.checks.check import check_model
from qarl.config import Config, ModelConfig, QuantConfig
from qarl.config.architecture import read_config_json
from qarl.config.messages import validated
from qarl.config.quant import OF_TRAINING, Init
from qarl.config.weight_files import CONFIG, stored_format
from qarl.errors import UserError
from qarl.inference.export_record import ExportRecord, Prompting, read_export_record
from qarl.inputs.paths import AnyPath, path_errors, user_path
from qarl.inputs.tensors import StoredTensor, stored_tensors
from qarl.storage.names import checkpoint_steps, step_name, step_of
from qarl.storage.runs import read_run_config
from qarl.utils.text import first_few


@dataclass(frozen=True)
class Target:
    """A policy to open: where it is, and the scheme to run it in.

    Attributes:
        kind: `run` (masters of a checkpoint), `export` (a quantized checkpoint, opened with its own codes and scales),
            or `model` (a Hugging Face model or GGUF, including an export in bf16, and a quantized checkpoint whose
            values are quantized to another scheme).
        name: As the user gave it.
        model: Location of config and tokenizer; for `model` and `export` also of the weights.
        quant: Scheme and layout to run in.
        run, run_dir, step, checkpoint: Of a run; otherwise None.
        record: Contents of qarl_export.json; None if the directory was not exported.
        verify_digests: Compare tensors with `record` when they are read.
    """

    kind: Literal["run", "export", "model"]
    name: str
    model: ModelConfig
    quant: QuantConfig
    run: Config | None = None
    run_dir: Path | None = None
    step: int | None = None
    checkpoint: Path | None = None
    record: ExportRecord | None = None
    verify_digests: bool = True

    @property
    def prompting(self) -> Prompting | None:
        """Return the prompting of the run, or of the run that was exported. None if unknown."""
        if self.run is not None:
            return Prompting.of(self.run)
        return None if self.record is None else self.record.prompting

    @property
    def digests(self) -> ExportRecord | None:
        """The record to compare tensors with when they are read; None if they are not compared."""
        return self.record if self.verify_digests else None

    @property
    def label(self) -> str:
        """One line for messages."""
        at = "" if self.step is None else f" step {self.step}"
        return f"{self.name}{at}, {self.quant.label}"


def given(**quant: Any) -> dict[str, Any]:
    """Return the `quant.*` keys that are not None."""
    return {key: value for key, value in quant.items() if value is not None}


def calibration_keys(
    method: str, source: AnyPath | None, samples: int | None, option: str = "--method"
) -> dict[str, Any]:
    """Return `quant.init` and `quant.calibration`, from options. option: that of the method.

    Raises UserError for an unknown method, or calibration without a method that calibrates.
    """
    if method not in get_args(Init):
        raise UserError(f"{option}: '{method}' is unknown; choose from {', '.join(get_args(Init))}")
    calibration = given(source=None if source is None else os.path.abspath(source), samples=samples)
    if method == "rtn" and calibration:
        name = "--calibration" if source is not None else "--calibration-samples"
        raise UserError(f"{name}: rounding to nearest does not calibrate; leave it out, or use {option} gptq")
    return {"init": method, "calibration": calibration}


def resolve_target(
    name: str,
    *,
    step: int | None = None,
    quant: Mapping[str, Any] | None = None,
    model: str | None = None,
    verify_digests: bool = True,
) -> Target:
    """Find out what `name` is. Reads no weights.

    Args:
        name: A run, one of its checkpoints, an exported directory, or a model.
        step: Checkpoint of a run. Default: the newest.
        quant: `quant.*` keys that replace the run's, or a model's default (scheme bf16). A quantized checkpoint is
            opened in its own scheme by default, and from its values if keys other than `kv_cache_dtype` are given. The
            default `scale_dtype` of a scheme with the same kind of weights is then the file's. The default
            `kv_cache_dtype` of an export is that of its run.
        model: Path of a run's base model, if it moved.
        verify_digests: Compare an exported directory with its qarl_export.json: configuration and tokenizer now,
            tensors when they are read.

    Raises:
        UserError: There is no such target or checkpoint, an option does not apply to it, or an exported directory was
            changed.
    """
    path = user_path(name, "TARGET")
    with path_errors(name):
        if path.is_file():
            raise UserError(f"{name}: is a file; give a run directory, a checkpoint directory, or a model")
        run_dir, checkpoint = _run_of(path)
        _refuse_missing_run(name, path)
    if run_dir is not None:
        return _run_target(name, run_dir, checkpoint, step, quant or {}, model)
    if step is not None:
        raise UserError(f"--step: {name} is not a run and has no steps; leave it out")
    if model is not None:
        raise UserError(f"--model: {name} is not a run and has its own configuration; leave it out")
    if path.is_dir() and not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
        raise UserError(
            f"{name}: holds neither a run's config.yaml nor a model's config.json; give a run directory, one of its "
            "checkpoints, or a model"
        )
    base = _model({"path": str(path) if path.is_dir() else name})
    record = read_export_record(path)
    if record is not None and verify_digests:
        record.check_documents()
    if record is not None:  # config.json does not have it
        quant = given(kv_cache_dtype=record.kv_cache_dtype) | dict(quant or {})
    check_model(base)
    stored = stored_format(path)
    kind: Literal["export", "model"] = "model"
    if stored is not None and stored.scheme is not None and not set(quant or {}) - {"kv_cache_dtype"}:
        kind, own = "export", _quant_of_export(path, stored, stored.scheme, quant or {})
    else:
        own = _quant({"scheme": "bf16"} | _scales_of(path, stored, quant or {}) | dict(quant or {}))
    return Target(kind, name, base, own, record=record, verify_digests=verify_digests)


def _quant_of_export(path: Path, stored: CheckpointFormat, scheme: Scheme, others: Mapping[str, Any]) -> QuantConfig:
    """Return the `quant` section of a quantized checkpoint, with the keys `others` on top."""
    found = stored_tensors(path)
    return _quant(
        {
            "scheme": scheme.name,
            **({"group_size": scheme.group_size or -1} if scheme.group_sizes else {}),
            "symmetric": scheme.symmetric,
            "ignore": _ignored(path, stored, found),
            **({"scale_dtype": _scale_dtype(path, stored, found)} if scheme.scale_dtypes else {}),
            **others,
        }
    )


def _scales_of(path: Path, stored: CheckpointFormat | None, quant: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `quant.scale_dtype` of a checkpoint if `quant` asks for a scheme with the same kind of weights.

    With that dtype the codes stay those of the file.
    """
    name, own = quant.get("scheme"), None if stored is None else stored.scheme
    if stored is None or own is None or name not in scheme_names():
        return {}
    kind = scheme_class(name)
    same = all(getattr(kind, key) == getattr(own, key) for key in ("weight_bits", "weight_type", "row_block"))
    return {"scale_dtype": _scale_dtype(path, stored, stored_tensors(path))} if same and kind.scale_dtypes else {}


def _ignored(path: Path, stored: CheckpointFormat, found: Mapping[str, StoredTensor]) -> list[str]:
    """Return the Linear layers that are not quantized: as config.json lists them, or those that have no codes."""
    if isinstance(stored, CompressedTensors):
        return list(stored.ignore)
    linears = read_config_json(path / CONFIG).linears()
    return ["lm_head", *(linear.name for linear in linears if not stored.quantizes(linear.name, found))]


def _scale_dtype(path: Path, stored: CheckpointFormat, found: Mapping[str, StoredTensor]) -> str:
    """Return the dtype of the stored weight scales, from the safetensors headers."""
    scales = {name: tensor for name, tensor in found.items() if name.endswith(f".{stored.scale}")}
    if not scales:
        raise UserError(f"{path}: config.json says it is quantized, but no .safetensors file holds a {stored.scale}")
    first, scale = next(iter(scales.items()))
    if scale.dtype not in (*FLOATS, "float8_e8m0fnu"):
        raise UserError(f"{scale.file}: weight scales of type {scale.dtype} cannot be read; export it again")
    if odd := [name for name, other in scales.items() if other.dtype != scale.dtype]:
        raise UserError(f"{scales[odd[0]].file}: {odd[0]} and {first} have different types; export it again")
    return scale.dtype if scale.dtype in FLOATS else "float32"


def _refuse_missing_run(name: str, path: Path) -> None:
    """Raise UserError if `name` looks like a missing run, because asking the hub for it would take half a minute."""
    if "/" not in name or path.exists():
        return
    if runs := sorted(other.parent.name for other in path.parent.glob("*/config.yaml")):
        raise UserError(f"{name}: no such run; {path.parent} holds {first_few(runs, 5)}")


def _run_of(path: Path) -> tuple[Path | None, Path | None]:
    """Return (run directory, checkpoint directory) of `path`, None for what it is not."""
    if (path / "config.yaml").is_file():
        return path, None
    if path.is_dir() and (path / "manifest.json").is_file() and path.resolve().parent.name == "checkpoints":
        found = path.resolve()
        if step_of(found.name) is None:
            raise UserError(f"{path}: its directory is not named by a step; give one such as checkpoints/000010")
        if (found.parent.parent / "config.yaml").is_file():
            return path.parent.parent if path.parent.name == "checkpoints" else found.parent.parent, found
        raise UserError(f"{path}: a checkpoint outside its run: there is no config.yaml in {found.parent.parent}")
    return None, None


def _run_target(
    name: str, run_dir: Path, checkpoint: Path | None, step: int | None, quant: Mapping[str, Any], model: str | None
) -> Target:
    run = read_run_config(run_dir)
    if checkpoint is None:
        steps = checkpoint_steps(run_dir / "checkpoints")
        if not steps:
            raise UserError(f"{name}: the run has no checkpoint yet; train it until checkpoint.every or to its end")
        if step is not None and step not in steps:
            raise UserError(f"--step: {name} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
        step = steps[-1] if step is None else step
        checkpoint = run_dir / "checkpoints" / step_name(step)
    elif step is not None and step_of(checkpoint.name) != step:
        of = step_of(checkpoint.name)
        raise UserError(f"--step: {name} is the checkpoint of step {of}; leave out --step")
    base = run.model
    if model is not None:
        base = _model(base.model_dump() | {"path": model, "gguf_file": None, "revision": None})
    try:
        check_model(base)
    except UserError as error:
        if model is not None:
            raise
        raise UserError(f"{error}; if the base model of {name} moved, give its new place with --model") from error
    own = run.quant.model_dump(exclude=OF_TRAINING)
    if quant.get("scheme", run.quant.scheme) != run.quant.scheme:  # keys of the run's scheme do not apply
        own = {key: own[key] for key in ("ignore", "scale_dtype", "kernels", "kv_cache_dtype")}
    return Target("run", name, base, _quant(own | dict(quant)), run, run_dir, step_of(checkpoint.name), checkpoint)


def _model(values: dict[str, Any]) -> ModelConfig:
    return validated(ModelConfig, values, lambda loc: "TARGET")


def _quant(values: dict[str, Any]) -> QuantConfig:
    return validated(QuantConfig, values, _option)


def _option(loc: tuple[int | str, ...]) -> str:
    """Return the command-line option that sets a `quant.*` key."""
    key = str(loc[0]) if loc else ""
    if key in ("init", "calibration"):
        return {"source": "--calibration", "samples": "--calibration-samples"}.get(str(loc[-1]), "--method")
    if key == "symmetric":
        return "--asymmetric"
    return f"--{key.replace('_', '-')}" if key in ("group_size", "grid", "ignore", "kv_cache_dtype") else "--scheme"
