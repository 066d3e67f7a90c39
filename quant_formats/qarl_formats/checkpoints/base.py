"""The interface of a checkpoint format. Imports no torch, so that a configuration can be checked without it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from qarl_formats.compressed import shown
from qarl_formats.registry import make_scheme
from qarl_formats.scheme import CHANNEL, GROUP_SIZES, Scheme, Shape, Tensors

if TYPE_CHECKING:
    from torch import Tensor

    from qarl_formats.weight import LowBitWeight

FLOATS = ("bfloat16", "float16", "float32")


class Stored(NamedTuple):
    """A tensor that a checkpoint must have. dtypes: Readable dtypes, by torch's names."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


StoredSpecs: TypeAlias = dict[str, Stored]


class CheckpointFormat(ABC):
    """How a checkpoint stores its quantized Linear layers, from the `quantization_config` of its config.json.

    Attributes:
        scheme: The scheme that stores the same codes and scales, except for the dtype of the scales. None: there is
            none, so weights are read as dequantized values.
    """

    method: ClassVar[str]
    """`quant_method` in config.json."""
    mark: ClassVar[str] = "weight_scale"
    """Suffix of a stored tensor that only quantized layers have."""
    scale: ClassVar[str] = "weight_scale"
    """Suffix of the scales."""

    scheme: Scheme | None = None

    @abstractmethod
    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises ValueError if a setting cannot be read."""

    def quantizes(self, module: str, found: Collection[str]) -> bool:
        """Whether the Linear `module` is quantized. found: names of the stored tensors."""
        return f"{module}.{self.mark}" in found

    @abstractmethod
    def specs(self, module: str, shape: Shape, found: Collection[str]) -> StoredSpecs:
        """Return the tensors of a quantized Linear by suffix. Raises ValueError if it cannot have this shape."""

    @abstractmethod
    def read(self, module: str, tensors: Tensors, shape: Shape) -> LowBitWeight | Tensor:
        """Return the weight of Linear `module` from its tensors by suffix, which match `specs`.

        A bias is among them only if the model has no such parameter.

        Returns:
            A weight in `scheme`, with the stored dtype of scales. Dequantized values float32 [N, K] if no scheme can
            store it, for example because the inputs of a group are not adjacent (activation order).

        Raises:
            ValueError: The tensors contradict each other; names one of them.
        """


def setting(config: Mapping[str, Any], key: str, allowed: Collection[Any], default: Any = None) -> Any:
    """Return a value of `quantization_config`. Raises ValueError unless it is allowed."""
    value = config.get(key, default)
    if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
        raise ValueError(f"{key} {shown(value)} cannot be read; only {' or '.join(map(shown, allowed))} can")
    return value


def group_size_of(config: Mapping[str, Any]) -> int | None:
    """Return `group_size`; None: one group per row. Raises ValueError if it is not a size."""
    size = config.get("group_size")
    if type(size) is not int or not (size == -1 or 0 < size < 2**20):
        raise ValueError(f"group_size {shown(size)} cannot be read; only a positive number or -1 can")
    return None if size == -1 else size


def count_of(what: str, total: int, each: int) -> int:
    """Return total / each. Raises ValueError if `each` does not divide it."""
    if total % each:
        raise ValueError(f"its {total} {what} are not a multiple of {each}")
    return total // each


def int4_scheme(group_size: int | None, symmetric: bool) -> Scheme | None:
    """Return the scheme with int4 codes in groups of this size (None: one per row); None if there is none."""
    if group_size not in (None, *GROUP_SIZES):
        return None
    return make_scheme("w4a16", group_size or CHANNEL, symmetric, scale_dtype="float16")
