"""Quantize single masters, or rows of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from qarl_formats.scheme import Scheme, check_shape
from qarl_formats.weight import LowBitWeight
from torch import Tensor

from qarl.errors import UserError

RUN_BYTES = 2**28  # bytes of float32 masters quantized at once; plain torch needs several temporaries of this size
SchemeOf = Callable[[str], Scheme | None]
"""The scheme of a parameter by name; None: it is not quantized."""


def quantize_parameter(
    name: str,
    master: Tensor,
    scheme: Scheme | None,
    dtype: torch.dtype,
    version: int,
    kernels: bool = False,
    shared: Tensor | None = None,
) -> LowBitWeight | Tensor:
    """Quantize one master, or round it to `dtype` if `scheme` is None.

    Args:
        name: The parameter's name, for errors.
        master: float32; not changed, and the result shares no memory with it.
        version: Policy version, for errors.
        kernels: Quantize with Triton, for a master on a GPU; the tensors are the same.
        shared: Value from `qarl.utils.packed_linears.shared_scales`.

    Raises:
        UserError: A value is not finite, or the scheme does not fit the shape; names the tensor.
    """
    quantizer = Quantizer(dtype, version, kernels)
    quantizer.check(name, master.shape, scheme)
    made = quantizer.quantize(name, master, scheme, shared)
    quantizer.require_finite({name: master}, lambda _: scheme)
    return made


class Quantizer:
    """Quantizes masters, or rows of them, and checks whether they are finite only at the end (`faults`).

    Args:
        dtype: dtype of unquantized parameters.
        version: Policy version, for errors.
        kernels: See `quantize_parameter`.
    """

    def __init__(self, dtype: torch.dtype, version: int, kernels: bool) -> None:
        self.dtype, self.version, self.kernels = dtype, version, kernels
        self._counts: dict[str, Tensor] = {}  # per quantized weight: number of values that are not finite
        self._largest: dict[str, Tensor] = {}  # per other parameter: maximum magnitude, NaN or infinite if any value is

    def check(self, name: str, shape: Sequence[int], scheme: Scheme | None) -> None:
        """Raise UserError if the scheme does not fit the shape of a whole master."""
        if scheme is not None:
            try:
                check_shape(scheme, name, *shape)
            except ValueError as error:
                raise UserError(f"quantize version {self.version}: {error}") from error

    def quantize(
        self, name: str, master: Tensor, scheme: Scheme | None, shared: Tensor | None
    ) -> LowBitWeight | Tensor:
        """Quantize a master, or some of its rows: whole units (`Scheme.row_unit`), at least one.

        Several calls may pass the rows of one master. Without a scheme there may be no rows.
        """
        master = master.detach()
        if scheme is not None:
            try:
                tensors, bad = scheme.quantize(master.contiguous(), self.kernels, shared)
            except ValueError as error:
                raise UserError(f"quantize version {self.version}: {name}: {error}") from error
            bad = bad.reshape(())
            self._counts[name] = self._counts[name] + bad if name in self._counts else bad
            return LowBitWeight(scheme, tensors, (master.shape[0], master.shape[1]))
        value = master.to(self.dtype, copy=True)
        largest = torch.linalg.vector_norm(value, torch.inf) if value.numel() else value.new_zeros(())
        self._largest[name] = torch.maximum(self._largest[name], largest) if name in self._largest else largest
        return value

    def add_no_rows(self, name: str, device: torch.device) -> None:
        """List a quantized weight in `faults`, without a fault, if this rank has none of its rows."""
        if name not in self._counts:
            self._counts[name] = torch.zeros((), dtype=torch.int32, device=device)

    def faults(self) -> tuple[list[str], Tensor]:
        """Return all names so far, and one float32 flag per name, on the device: 1 if a value is not finite, else 0.

        The order of the names depends only on the order of the calls.
        """
        flags = [torch.stack(list(self._counts.values())) != 0] if self._counts else []
        if self._largest:
            flags.append(torch.stack(list(self._largest.values())).isfinite().logical_not_())
        return [*self._counts, *self._largest], torch.cat(flags).float() if flags else torch.zeros(0)

    def require_finite(self, masters: Mapping[str, Tensor], scheme_of: SchemeOf) -> None:
        """Raise UserError for the first master with values that are not finite. Synchronizes with the device."""
        names, flags = self.faults()
        faulty = {name for name, flag in zip(names, flags.tolist(), strict=True) if flag}
        for name in filter(faulty.__contains__, masters):
            if bad := int(self.bad_values(masters[name], scheme_of(name)).item()):
                raise self.refusal(name, scheme_of(name), bad, masters[name].numel())
        assert not faulty, f"flagged as not finite, but no bad value was found: {faulty}"

    def bad_values(self, master: Tensor, scheme: Scheme | None) -> Tensor:
        """Count the NaN or infinite values, for `refusal`: int64 [] on the device."""
        values = master.detach() if scheme is not None else master.detach().to(self.dtype)
        return values.isfinite().logical_not_().sum()

    def refusal(self, name: str, scheme: Scheme | None, bad: int, total: int) -> UserError:
        """Return the error for a parameter with `bad` values that are NaN or infinite."""
        why = f"in {self.dtype}" if scheme is None else "and cannot be quantized"
        return UserError(
            f"quantize version {self.version}: {name}: {bad} of {total} values are NaN or infinite {why}; "
            "go back to an earlier checkpoint or lower the learning rate"
        )
