"""Entries of the tile tables in the package."""

from collections.abc import Iterator

from qarl_kernels.tuning import Entry, Shape, load_table


def entries(device: str, grouped: bool) -> Iterator[tuple[str, Shape, Entry]]:
    """Return a GPU's own dense or grouped entries: family, shape, entry without unmeasured numbers of rows."""
    for family, shapes in load_table(device).items():
        for shape, entry in shapes.items():
            if bool(shape.experts) == grouped:
                yield family, shape, Entry(tuple((most, tile) for most, tile in entry.tiles if tile is not None))
