"""Masters that lie under one another in memory, as a layer's experts do: those of a run are quantized in one go.

A mixture has thousands of small matrices, and of each a scheme's own launches, or those that round it to 16 bits, would
take longer than its work. Rows are quantized by themselves, so what is stored of each is bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from qarl_formats.rows import adjacent
from qarl_formats.scheme import Scheme
from torch import Tensor

RUN_BYTES = 2**28  # of float32 masters quantized at once: in plain torch there are several temporaries of the size


def runs(
    names: Sequence[str],
    masters: Mapping[str, Tensor],
    scheme_of: Callable[[str], Scheme | None],
    most: int = RUN_BYTES,
) -> Iterator[list[str]]:
    """Those of the names, in their order, whose masters follow one another in memory, in runs of `most` bytes or of
    one master. None where they do not, or where a scheme stores rows of one with those of the next."""
    schemes = {scheme_of(name) for name in names}
    scheme = schemes.pop()
    if schemes or (scheme is not None and not scheme.can_concatenate([masters[name].shape[0] for name in names])):
        return
    if not adjacent([masters[name] for name in names]):
        return
    run: list[str] = []
    size = 0
    for name in names:
        if run and size + masters[name].nbytes > most:
            yield run
            run, size = [], 0
        run.append(name)
        size += masters[name].nbytes
    yield run
