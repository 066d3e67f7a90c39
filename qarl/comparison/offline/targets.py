"""The model under each of its schemes, and what tells one state of its weights from another."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from qarl_formats.registry import grouped_names, scheme_names

from qarl.errors import UserError
from qarl.inference.target import Target, given, resolve_target
from qarl.policy.load_config import locate

REFERENCE = "bf16"


def scheme_targets(
    model: str,
    schemes: list[str],
    group_size: int | None,
    kv_cache_dtype: str | None,
    verify_digests: bool = True,
) -> dict[str, Target]:
    """The target of each scheme, in the order given. Reads no weights.

    Args:
        model: A run, one of its checkpoints, or a model.
        schemes: Their names.
        group_size: Of the schemes that have groups.
        kv_cache_dtype: Of all schemes; None: as the run was trained, for a model auto.
        verify_digests: See `resolve_target`.

    Raises:
        UserError: No scheme, an unknown scheme, one named twice, a group size that no scheme here has, a quantized
            checkpoint.
    """
    for place, name in enumerate(schemes):
        if name not in scheme_names():
            raise UserError(f"--schemes: '{name}' is unknown; choose from {','.join(scheme_names())}")
        if name in schemes[:place]:
            raise UserError(f"--schemes: {name} is named twice; name it once")
    if not schemes:
        raise UserError(f"--schemes: names no scheme; choose from {','.join(scheme_names())}")
    if group_size is not None and not set(schemes) & set(grouped_names()):
        raise UserError(f"--group-size {group_size}: none of the schemes {','.join(schemes)} has groups; leave it out")
    if resolve_target(model, verify_digests=verify_digests).kind == "export":
        raise UserError(f"{model}: is quantized already; give the model that it was made from")
    cache = given(kv_cache_dtype=kv_cache_dtype)
    quants = {name: {"scheme": name} | _group(name, group_size) | cache for name in schemes}
    return {name: resolve_target(model, quant=quant, verify_digests=verify_digests) for name, quant in quants.items()}


def reference_target(model: str, verify_digests: bool = True) -> Target:
    """The model with nothing quantized, nor its KV cache. Reads no weights. Raises UserError: see `resolve_target`."""
    return resolve_target(model, quant={"scheme": REFERENCE, "kv_cache_dtype": "auto"}, verify_digests=verify_digests)


def _group(scheme: str, group_size: int | None) -> dict[str, int]:
    return {"group_size": group_size} if group_size is not None and scheme in grouped_names() else {}


def weights_mark(target: Target) -> str | None:
    """Changes when the files of the weights do (by name, size and time); None for a hub name."""
    directory = target.checkpoint or Path(locate(target.model).name).expanduser()
    if not directory.is_dir():
        return None
    files = [path for path in sorted(directory.iterdir()) if path.suffix in (".safetensors", ".bin", ".gguf", ".json")]
    entries = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]
