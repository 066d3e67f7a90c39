"""What a quantization scheme is. Imports no torch, so that a configuration can be checked without it."""

from __future__ import annotations

import re
from dataclasses import dataclass

SCHEMES = ("bf16", "w4a16", "w8a8", "fp8", "w4a8")
GROUP_SIZES = (32, 64, 128)
CHANNEL = -1
DEFAULT_GROUP_SIZE = 128
GRIDS = ("compressed-tensors", "symmetric7")
SCALE_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Scheme:
    """How the Linear layers of a model are stored and multiplied. Build one with `make_scheme`.

    Args:
        name: one of `SCHEMES`.
        weight_bits: 4 or 8; None for bf16.
        weight_type: "int" or "float" (e4m3fn); None for bf16.
        group_size: input features that share a scale; None = the whole row (per channel).
        symmetric: False stores a zero point per group.
        grid: "compressed-tensors" (absmax / 7.5, codes -8..7) or "symmetric7" (absmax / 7, codes -7..7).
        activation: dtype the activations are quantized to, per token and dynamically; None = not quantized.
        scale_dtype: dtype the weight scales are stored in; codes are computed from the stored value.
    """

    name: str
    weight_bits: int | None
    weight_type: str | None
    group_size: int | None
    symmetric: bool
    grid: str
    activation: str | None
    scale_dtype: str

    @property
    def quantized(self) -> bool:
        return self.weight_bits is not None

    @property
    def packed(self) -> bool:
        """Whether codes are stored eight to an int32 (`weight_packed`) rather than one to a byte (`weight`)."""
        return self.weight_bits == 4

    def num_groups(self, in_features: int) -> int:
        """Scales per output row of a Linear with `in_features` inputs."""
        return 1 if self.group_size is None else in_features // self.group_size


# name -> (weight_bits, weight_type, activation)
LAYOUTS: dict[str, tuple[int | None, str | None, str | None]] = {
    "bf16": (None, None, None),
    "w4a16": (4, "int", None),
    "w8a8": (8, "int", "int8"),
    "fp8": (8, "float", "fp8"),
    "w4a8": (4, "int", "int8"),
}


def make_scheme(
    name: str,
    group_size: int | None = None,
    symmetric: bool = True,
    grid: str = "compressed-tensors",
    scale_dtype: str = "bfloat16",
) -> Scheme:
    """Build the scheme `name`, refusing combinations that no kernel or file format has.

    Args:
        name: one of `SCHEMES`.
        group_size: 32, 64, 128 or -1 (per channel), for w4a16 and w4a8 only; None means 128 there.
        symmetric: False for w4a16 only.
        grid: "symmetric7" for symmetric w4a16 and w4a8 only.
        scale_dtype: one of `SCALE_DTYPES`.

    Raises:
        ValueError: one line that names the argument, its value and what is valid.
    """
    if name not in LAYOUTS:
        raise ValueError(f"scheme {name!r} is unknown; choose one of {', '.join(SCHEMES)}")
    bits, weight_type, activation = LAYOUTS[name]
    if scale_dtype not in SCALE_DTYPES:
        raise ValueError(f"scale_dtype {scale_dtype!r} is unknown; choose one of {', '.join(SCALE_DTYPES)}")
    if grid not in GRIDS:
        raise ValueError(f"grid {grid!r} is unknown; choose one of {', '.join(GRIDS)}")
    if bits != 4 and group_size is not None:
        raise ValueError(f"group_size {group_size} does not apply to scheme {name}; leave it out (null)")
    if bits == 4 and group_size not in (None, CHANNEL, *GROUP_SIZES):
        raise ValueError(f"group_size {group_size} is not supported; choose 32, 64, 128 or -1 (one group a row)")
    if not symmetric and name != "w4a16":
        raise ValueError(f"symmetric false does not apply to scheme {name}; only w4a16 stores zero points")
    if grid == "symmetric7" and (bits != 4 or not symmetric):
        given = name if symmetric else f"{name} with symmetric false"
        raise ValueError(f"grid symmetric7 needs symmetric w4a16 or w4a8, not {given}")
    if bits == 4 and group_size is None:
        group_size = DEFAULT_GROUP_SIZE
    return Scheme(
        name=name,
        weight_bits=bits,
        weight_type=weight_type,
        group_size=None if group_size == CHANNEL else group_size,
        symmetric=symmetric,
        grid=grid,
        activation=activation,
        scale_dtype=scale_dtype,
    )


def check_shape(scheme: Scheme, name: str, out_features: int, in_features: int) -> None:
    """Check that a Linear with weight [out_features, in_features] can be stored in `scheme`.

    Raises:
        ValueError: the group size does not divide `in_features`; names the layer and the group sizes that do.
    """
    if out_features < 1 or in_features < 1:
        raise ValueError(f"{name}: weight [{out_features}, {in_features}] is empty; add the layer to the ignore list")
    if scheme.group_size is None or in_features % scheme.group_size == 0:
        return
    fits = [str(size) for size in GROUP_SIZES if in_features % size == 0] + ["-1 (one group a row)"]
    raise ValueError(
        f"{name}: group_size {scheme.group_size} does not divide its {in_features} input features; "
        f"use {' or '.join(fits)}, or add the layer to the ignore list"
    )


def is_ignored(name: str, ignore: list[str]) -> bool:
    """Whether module `name` stays unquantized: an entry equals it, or `re:<regex>` matches from its start.

    The rule of compressed-tensors `match_name` (`re.match`, so a pattern for a suffix starts with `.*`).

    Raises:
        ValueError: an entry's regex does not compile.
    """
    for entry in ignore:
        if not entry.startswith("re:"):
            if entry == name:
                return True
            continue
        try:
            matched = re.match(entry.removeprefix("re:"), name)
        except re.error as error:
            raise ValueError(f"ignore entry {entry!r} is not a valid regular expression: {error}") from None
        if matched:
            return True
    return False
