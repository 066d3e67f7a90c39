"""The FP32 masters of a run or a model, one tensor at a time, in the order of the model's parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from qarl_formats.compressed import TensorSpec, tensor_specs
from qarl_formats.quantize import QuantizedWeight
from qarl_formats.scheme import Scheme, check_shape, is_ignored
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from qarl.config import ModelConfig, QuantConfig
from qarl.config.quant import scheme_of
from qarl.errors import UserError
from qarl.inference.target import Target
from qarl.policy.load import load_generation_config, load_model, load_model_config, locate
from qarl.policy.skeleton import linear_names, skeleton
from qarl.publish.snapshot import published
from qarl.storage.checkpoint import CheckpointStore


@dataclass(frozen=True)
class Masters:
    """A model's parameters without the model.

    config, generation: of the model, unquantized. shapes: parameter name -> shape, in the model's own order, tied
    weights once. linears: modules a scheme may quantize. read(name): the float32 values, on the CPU.
    version, digest: of the run's snapshot that was made from these masters; None for a model.
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
    ) -> Iterator[tuple[str, QuantizedWeight | Tensor]]:
        """Each parameter as it is published, in order; one at a time is in memory.

        Raises UserError before the first one where the scheme does not fit a layer.
        """
        scheme = scheme_of(quant)
        self.check(scheme, quant.ignore)
        for name in self.shapes:
            low_bit = name.endswith(".weight") and self._quantized(name.removesuffix(".weight"), scheme, quant.ignore)
            yield name, published(name, self.read(name).to(device), scheme if low_bit else None, dtype,
                                  self.version or 0)  # fmt: skip

    def specs(self, quant: QuantConfig, dtype: torch.dtype, unpacked: bool = False) -> dict[str, dict[str, TensorSpec]]:
        """Parameter name -> the tensors that are stored of what `forms` will give for it; reads nothing.

        unpacked: see `qarl_formats.compressed.tensor_specs`.
        """
        scheme = scheme_of(quant)
        found: dict[str, dict[str, TensorSpec]] = {}
        for name, shape in self.shapes.items():
            module = name.removesuffix(".weight")
            if name.endswith(".weight") and self._quantized(module, scheme, quant.ignore):
                stored = tensor_specs(scheme, *shape, unpacked=unpacked)
                found[name] = {f"{module}.{suffix}": spec for suffix, spec in stored.items()}
            else:
                found[name] = {name: TensorSpec(shape, str(dtype).removeprefix("torch."))}
        return found

    def check(self, scheme: Scheme, ignore: list[str], place: str = "quant.group_size") -> None:
        """Raise UserError for the first layer that the scheme cannot store. place: where the user chose its groups."""
        for module in (name.removesuffix(".weight") for name in self.shapes):
            if self._quantized(module, scheme, ignore):
                try:
                    check_shape(scheme, module, *self.shapes[f"{module}.weight"])
                except ValueError as error:
                    raise UserError(f"{place}: {error}") from error

    def _quantized(self, module: str, scheme: Scheme, ignore: list[str]) -> bool:
        return scheme.quantized and module in self.linears and not is_ignored(module, ignore)


def open_masters(target: Target) -> Masters:
    """The masters of a run's checkpoint (verified against its digests) or of a model.

    Raises UserError: an exported checkpoint, which has none; a damaged checkpoint; one made for another model.
    """
    assert target.kind != "export", "an exported checkpoint has codes, no masters"
    config = plain_config(load_model_config(target.model))
    model = skeleton(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    common = (config, load_generation_config(target.model), shapes, frozenset(linear_names(model)))
    if target.checkpoint is None:
        return Masters(*common, _model_reader(target.model, shapes))
    checkpoint = CheckpointStore.load(target.checkpoint, groups=("masters",))
    tensors, state = checkpoint.tensors["masters"], checkpoint.state
    if odd := sorted(tensors.keys() ^ shapes.keys()) or [n for n in shapes if tuple(tensors[n].shape) != shapes[n]]:
        raise UserError(f"{target.checkpoint}: made for another model than '{target.model.path}' ('{odd[0]}' is not "
                        "the same in both); give the model that the run started from with --model")  # fmt: skip
    return Masters(*common, lambda name: tensors[name], state["version"], state["snapshot_sha256"])


def plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same configuration without a quantization entry (GGUF loading leaves one behind)."""
    values = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    return type(config).from_dict(values)


def _model_reader(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> Callable[[str], Tensor]:
    """Reads from safetensors files tensor by tensor where the model is a directory of them, else loads it whole."""
    files = _safetensors_of(model)
    if files is None or any(name not in files for name in shapes):
        loaded = dict(load_model(model).named_parameters())
        return lambda name: loaded[name].detach()

    def read(name: str) -> Tensor:
        try:
            with safe_open(files[name], framework="pt") as file:
                tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{files[name]}: not a readable safetensors file ({error}); restore it") from error
        if tuple(tensor.shape) != shapes[name]:
            raise UserError(f"{files[name]}: {name} has shape {list(tensor.shape)}, config.json says "
                            f"{list(shapes[name])}")  # fmt: skip
        return tensor.float()

    return read


def _safetensors_of(model: ModelConfig) -> dict[str, Path] | None:
    """Tensor name -> file, of a directory with safetensors; None for GGUF, other formats and hub names."""
    source = locate(model)
    directory = Path(source.name).expanduser()
    if source.gguf_file is not None or not directory.is_dir():
        return None
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            weight_map: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: directory / file for name, file in weight_map.items()}
        single = directory / "model.safetensors"
        if not single.is_file():
            return None
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise UserError(f"{directory}: its safetensors files cannot be read ({error}); restore them") from error
