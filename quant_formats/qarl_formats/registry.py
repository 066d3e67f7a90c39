"""Registry of quantization schemes by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from qarl_formats.scheme import CHANNEL, DEFAULT_GROUP_SIZE, GRIDS, SCALE_DTYPES, Scheme

_SCHEMES: dict[str, type[Scheme]] = {}
S = TypeVar("S", bound=type[Scheme])


def register(kind: S) -> S:
    """Class decorator that registers a scheme under its `name`. Raises ValueError if the name is taken."""
    if kind.name in _SCHEMES:
        raise ValueError(f"scheme {kind.name!r} is registered already ({_SCHEMES[kind.name].__module__})")
    _SCHEMES[kind.name] = kind
    return kind


def scheme_class(name: str) -> type[Scheme]:
    """Return the scheme called `name`. Raises ValueError if it is unknown."""
    if name not in _SCHEMES:
        raise ValueError(f"scheme {name!r} is unknown; choose one of {', '.join(_SCHEMES)}")
    return _SCHEMES[name]


def scheme_names(of: Callable[[type[Scheme]], bool] = lambda kind: True) -> tuple[str, ...]:
    """Return the names of all schemes, or of those that `of` accepts."""
    return tuple(name for name, kind in _SCHEMES.items() if of(kind))


def grouped_names() -> tuple[str, ...]:
    """Return the schemes with a configurable group size."""
    return scheme_names(lambda kind: bool(kind.group_sizes))


def make_scheme(
    name: str,
    group_size: int | None = None,
    symmetric: bool = True,
    grid: str = GRIDS[0],
    scale_dtype: str = SCALE_DTYPES[0],
) -> Scheme:
    """Build the scheme `name`; rejects combinations that no kernel or file format supports.

    Args:
        name: Name of a registered scheme.
        group_size: 32, 64, 128 or -1 (per channel), for schemes with groups. Default: 128.
        symmetric: False only for schemes with zero points.
        grid: "symmetric7" only for symmetric int4.
        scale_dtype: One of `SCALE_DTYPES`.

    Raises:
        ValueError: An argument does not fit the scheme; one line with the argument, its value and what is valid.
    """
    for option, value, known in (("grid", grid, GRIDS), ("scale_dtype", scale_dtype, SCALE_DTYPES)):
        if value not in known:
            raise ValueError(f"{option} {value!r} is unknown; choose one of {', '.join(known)}")
    kind, given = scheme_class(name), {"group_size": group_size, "symmetric": symmetric, "grid": grid}
    for option, text in option_faults(name, group_size, symmetric, grid):
        raise ValueError(f"{option} {given[option]}: {text}")
    if kind.group_sizes and group_size is None:
        group_size = DEFAULT_GROUP_SIZE
    return kind(None if group_size == CHANNEL else group_size, symmetric, grid, scale_dtype)


def option_faults(name: str, group_size: int | None, symmetric: bool, grid: str) -> Iterator[tuple[str, str]]:
    """Yield (argument of `make_scheme`, what is valid) for arguments that scheme `name` does not have."""
    kind = scheme_class(name)
    if group_size is not None and not kind.group_sizes:
        yield "group_size", f"scheme {name} has no groups; leave null, or use {' or '.join(grouped_names())}"
    elif group_size not in (None, CHANNEL, *kind.group_sizes):
        yield "group_size", f"must be {', '.join(map(str, kind.group_sizes))} or -1 (one group per row)"
    if not symmetric and not kind.zero_points:
        others = " and ".join(scheme_names(lambda other: other.zero_points))
        yield "symmetric", f"only scheme {others} has zero points; must be true for {name}"
    if grid not in kind.grids or (grid != GRIDS[0] and not symmetric):
        others = " and ".join(scheme_names(lambda other: grid in other.grids))
        yield "grid", f"is for symmetric {others}; use {GRIDS[0]} with {name if symmetric else f'asymmetric {name}'}"
