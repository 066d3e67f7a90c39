"""The model under each scheme, and a digest that identifies its weights."""

import hashlib
import json
from collections.abc import Collection, Sequence
from pathlib import Path

from qarl_formats.registry import grouped_names

from qarl.config.quant import schemes_of_init
from qarl.errors import UserError
from qarl.inference.target import Target, calibration_keys, given, resolve_target
from qarl.inputs.files import read_bytes
from qarl.storage.input_files import UNKNOWN, model_files
from qarl.storage.manifest import MANIFEST

REFERENCE = "bf16"


def scheme_targets(
    model: str,
    schemes: list[str],
    group_size: int | None,
    kv_cache_dtype: str | None,
    verify_digests: bool = True,
    methods: Sequence[str] = ("rtn",),
    calibration: Path | None = None,
    calibration_samples: int | None = None,
) -> dict[str, Target]:
    """Return the target of each scheme and method by `member_name`, in the given order. Reads no weights.

    Args:
        model: A run, one of its checkpoints, or a model.
        schemes: Names of schemes, each once.
        group_size: Group size of the schemes that have groups.
        kv_cache_dtype: KV cache dtype of all schemes. Default: as in the run, or auto for a model.
        verify_digests: See `resolve_target`.
        methods: Values of `quant.init`. A scheme gets the methods that it has; bf16 has only rtn, and always gets it.
        calibration, calibration_samples: See `calibration_keys`.

    Raises:
        UserError: No scheme supports the group size, or a scheme supports none of the methods.
    """
    if group_size is not None and not set(schemes) & set(grouped_names()):
        raise UserError(
            f"--group-size {group_size}: none of the schemes {','.join(schemes)} has groups; remove the option"
        )
    cache = given(kv_cache_dtype=kv_cache_dtype)
    calibrating = [method for method in methods if method != "rtn"] or ["rtn"]
    keys = {method: calibration_keys(method, calibration, calibration_samples, "--methods") for method in calibrating}
    quants = {
        member_name(scheme, method): {"scheme": scheme} | _group(scheme, group_size) | cache | keys.get(method, {})
        for scheme in schemes
        for method in _methods_of(scheme, methods)
    }
    return {name: resolve_target(model, quant=quant, verify_digests=verify_digests) for name, quant in quants.items()}


def trained_targets(names: Sequence[str], taken: Collection[str], verify_digests: bool = True) -> dict[str, Target]:
    """Return trained policies by member name: runs, checkpoints of runs, or exports, in their own scheme.

    Args:
        names: As given by the user.
        taken: Member names of the schemes.
        verify_digests: See `resolve_target`.

    Raises:
        UserError: There is no such policy, or two have the same name.
    """
    found: dict[str, Target] = {}
    for name in names:
        target = resolve_target(name, verify_digests=verify_digests)
        label = Path(name).name or name
        if label in found or label in taken:
            raise UserError(f"compare: {name}: another row is called {label}; rename the directory, or leave one out")
        found[label] = target
    return found


def reference_target(model: str, verify_digests: bool = True) -> Target:
    """Return the unquantized model, including an unquantized KV cache. Reads no weights.

    Raises:
        UserError: See `resolve_target`.
    """
    return resolve_target(model, quant={"scheme": REFERENCE, "kv_cache_dtype": "auto"}, verify_digests=verify_digests)


def member_name(scheme: str, method: str) -> str:
    """Return the name of a row: `w4a16`, or `w4a16-gptq`."""
    return scheme if method == "rtn" else f"{scheme}-{method}"


def _methods_of(scheme: str, methods: Sequence[str]) -> list[str]:
    """Return the methods that support a scheme. Raises UserError if there are none."""
    if scheme == REFERENCE:
        return ["rtn"]
    found = [method for method in methods if scheme in schemes_of_init(method)]
    if not found:
        given = ",".join(methods)
        raise UserError(f"--methods: {given} does not support scheme {scheme}; add rtn, or leave out {scheme}")
    return found


def _group(scheme: str, group_size: int | None) -> dict[str, int]:
    return {"group_size": group_size} if group_size is not None and scheme in grouped_names() else {}


def weights_mark(target: Target) -> str | None:
    """Return a digest of the files that determine a target's numbers, so that one table never mixes two models.

    The files are the model's configuration, tokenizer and weights. A checkpoint of a run has its own weights, whose
    digests are in its manifest. None for a hub name that is not in the local cache.

    Raises:
        UserError: A file cannot be read.
    """
    files = model_files(target.model, weights=target.checkpoint is None)
    if UNKNOWN in files.values():
        return None
    manifest = None if target.checkpoint is None else read_bytes(target.checkpoint / MANIFEST)
    parts = [files, None if manifest is None else hashlib.sha256(manifest).hexdigest()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
