"""FP32 masters of a run or a model, read one tensor at a time in the order of the model's parameters."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from qarl_formats.scheme import Scheme, TensorSpec, check_shape, is_ignored
from qarl_formats.weight import LowBitWeight
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from qarl.config import ModelConfig, QuantConfig
from qarl.config.quant import scheme_of
from qarl.errors import UserError
from qarl.inference.export_record import SKIP_IN_TRAINING, ExportRecord, TensorDigest, read_export_record
from qarl.inference.target import Target
from qarl.inputs.paths import user_path
from qarl.policy.load import load_model, load_tokenizer, model_weights
from qarl.policy.load_config import load_generation_config, load_model_config, plain_config
from qarl.policy.model_identity import changed_inputs, model_digests, model_files
from qarl.policy.skeleton import linear_names, skeleton
from qarl.storage.loading import load_checkpoint
from qarl.storage.saved_state import Inputs, PolicyState, saved_state
from qarl.utils.packed_linears import shared_scales
from qarl.weight_sync.quantize import quantize_parameter
from qarl.weight_sync.snapshot import describe


@dataclass(frozen=True)
class Masters:
    """The FP32 parameters of a model, read lazily.

    Attributes:
        config: Configuration of the unquantized model.
        generation: Its generation config.
        shapes: Shape by parameter name, in the model's order; tied weights once.
        linears: Modules that a scheme may quantize.
        read: Returns the float32 values of a name, on the CPU. Each call joins the shards of several ranks.
        version: Version of the run's snapshot of these masters; None for a model.
        digest: Digest of the same snapshot.
    """

    config: PreTrainedConfig
    generation: GenerationConfig
    shapes: Mapping[str, tuple[int, ...]]
    linears: frozenset[str]
    read: Callable[[str], Tensor]
    version: int | None = None
    digest: str | None = None

    def forms(
        self, quant: QuantConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[str, LowBitWeight | Tensor]]:
        """Yield (name, published form) of each parameter in order, with one parameter in memory at a time.

        Raises UserError before the first parameter if the scheme does not fit a layer.
        """
        scheme = scheme_of(quant)
        self.check(scheme, quant.ignore)
        modules = [name.removesuffix(".weight") for name in self.shapes if name.endswith(".weight")]
        quantized = [module for module in modules if self._quantized(module, scheme, quant.ignore)]
        shared = shared_scales(quantized, scheme, self.read)
        low_bit = {f"{module}.weight" for module in quantized}
        for name in self.shapes:
            own, version = scheme if name in low_bit else None, self.version or 0
            # The master is not bound to a variable, which would keep it alive while the next one is read.
            yield (
                name,
                quantize_parameter(name, self.read(name).to(device), own, dtype, version, shared=shared.get(name)),
            )

    def specs(self, quant: QuantConfig, dtype: torch.dtype, unpacked: bool = False) -> dict[str, dict[str, TensorSpec]]:
        """Return the stored tensors of each parameter that `forms` will yield. Reads nothing.

        unpacked: see `Scheme.tensor_specs`.
        """
        scheme = scheme_of(quant)
        found: dict[str, dict[str, TensorSpec]] = {}
        for name, shape in self.shapes.items():
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and self._quantized(module, scheme, quant.ignore):
                out_features, in_features = shape
                stored = scheme.tensor_specs(out_features, in_features, unpacked=unpacked)
                found[name] = {f"{module}.{suffix}": spec for suffix, spec in stored.items()}
            else:
                found[name] = {name: TensorSpec(shape, str(dtype).removeprefix("torch."))}
        return found

    def check(self, scheme: Scheme, ignore: list[str], place: str = "quant.group_size") -> None:
        """Raise UserError for the first layer that the scheme cannot store. place: the option that sets group sizes."""
        for module in (name.removesuffix(".weight") for name in self.shapes):
            if self._quantized(module, scheme, ignore):
                try:
                    check_shape(scheme, module, *self.shapes[f"{module}.weight"])
                except ValueError as error:
                    raise UserError(f"{place}: {error}") from error

    def _quantized(self, module: str, scheme: Scheme, ignore: list[str]) -> bool:
        return scheme.quantized and module in self.linears and not is_ignored(module, ignore)


def open_masters(target: Target, tokenizer: PreTrainedTokenizerBase | None = None) -> Masters:
    """Open the masters of a run's checkpoint, verified against its digests, or of a model.

    Args:
        target: A run or a model.
        tokenizer: Tokenizer of the target, if it is already loaded.

    Raises:
        UserError: The checkpoint is damaged or belongs to another model, or the model's configuration, tokenizer or
            chat template changed since the run.
    """
    assert target.kind != "export", "an exported checkpoint has codes and no masters"
    config, generation = plain_config(load_model_config(target.model)), load_generation_config(target.model)
    state = None
    if target.checkpoint is not None:
        checkpoint = load_checkpoint(target.checkpoint, groups=("masters",))
        state = saved_state(PolicyState, checkpoint.state, str(target.checkpoint))
        tokenizer = tokenizer or load_tokenizer(target.model)
        _require_same_model(target, state, config, generation, tokenizer)
    model = skeleton(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    common = (config, generation, shapes, frozenset(linear_names(model)))
    if state is None:
        return Masters(*common, _model_reader(target.model, target.quant, target.digests))
    tensors = checkpoint.tensors["masters"]
    if odd := sorted(tensors.keys() ^ shapes.keys()) or [n for n in shapes if tensors.shape(n) != shapes[n]]:
        raise UserError(
            f"{target.checkpoint}: made for another model than '{target.model.path}' ('{odd[0]}' "
            "differs); give the model that the run started from with --model"
        )
    if wrong := [name for name in tensors if tensors.dtype(name) != torch.float32]:
        raise UserError(
            f"{target.checkpoint}: {wrong[0]} is {tensors.dtype(wrong[0])}, and masters are float32; "
            "restore the checkpoint"
        )
    return Masters(*common, lambda name: tensors[name], state.version, state.snapshot_sha256)


def _require_same_model(
    target: Target,
    state: PolicyState,
    config: PreTrainedConfig,
    generation: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Raise UserError if the base model's small files changed since the checkpoint with this state was saved.

    The base weights are not compared, because the checkpoint has its own. Nor are values that an older version of qarl
    did not record.
    """
    now = Inputs({"model": model_digests(target.model, generation, tokenizer)}, model_files(config, generation))
    if changed := [what for _, what in changed_inputs(state, now)]:
        raise UserError(
            f"{target.checkpoint}: {' and '.join(changed)} changed since it was saved; restore "
            f"'{target.model.path}', or give the model that the run started from with --model"
        )


def _model_reader(model: ModelConfig, quant: QuantConfig, record: ExportRecord | None) -> Callable[[str], Tensor]:
    """Return a function that reads a parameter as float32. A GGUF file is loaded as a whole, here.

    If qarl exported the model, each tensor is compared with the export's record when it is first read.
    Raises UserError as `load_model`, and if the names in files and record differ.
    """
    weights = model_weights(model, quant)
    if weights is None:
        loaded = dict(load_model(model).named_parameters())
        return lambda name: loaded[name].detach()
    unchecked = set() if record is None else set(record.tensors)
    if record is not None:
        record.check_names(weights.files)

    def read(name: str) -> Tensor:
        for part in weights.parts(name).values():
            if record is not None and part in unchecked:
                record.check_tensor(weights.files[part].file, part, digest_of(weights.tensor(part)))
                unchecked.discard(part)
        return weights.read(name)

    return read


def verify_base(model: ModelConfig, rank: int = 0, count: int = 1) -> None:
    """Compare a model to train from with its qarl_export.json, if qarl exported it and `verify_digests` is on.

    Args:
        model: The `model` section.
        rank, count: This rank and the number of ranks. Each rank hashes a part of the tensors.

    Raises:
        UserError: A tensor, the configuration or the tokenizer differs from the export.
    """
    record = read_export_record(user_path(model.path, "model.path"), SKIP_IN_TRAINING) if model.verify_digests else None
    if record is None:
        return
    record.check_documents()
    weights = model_weights(model)
    if weights is None:
        return
    record.check_names(weights.files)
    names = list(weights.files)[rank::count]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        for name, found in zip(names, pool.map(lambda name: digest_of(weights.tensor(name)), names), strict=True):
            record.check_tensor(weights.files[name].file, name, found)


def digest_of(tensor: Tensor) -> TensorDigest:
    """Return shape, dtype and SHA-256 of a tensor, as qarl_export.json records them."""
    found = describe(tensor)
    return TensorDigest(shape=list(found.shape), dtype=found.dtype, sha256=found.sha256)
