"""rich's console for untrusted text: no markup, and control characters are always escaped."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from qarl.terminal.streams import InertStream
from qarl.utils.text import visible


class Console(rich.console.Console):
    """rich's console, in which text that looks like markup, a link or an escape sequence is printed literally.

    Args:
        file: The stream. Default: the current standard output, or standard error with `stderr`.
        stderr: Use standard error.
        options: Options of rich's console.
    """

    def __init__(self, file: TextIO | None = None, *, stderr: bool = False, **options: Any) -> None:
        stream: Any = file or (sys.stderr if stderr else sys.stdout)
        if isinstance(stream, InertStream):
            stream = stream.outlet  # rich itself may emit colours and cursor movements
        super().__init__(file=stream, markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style = segment.text, segment.style
            if style is not None and style.link:  # from library output captured by a live display
                style = style.update_link(None)
            if not segment.control:
                text = visible(text, keep_newlines=True)
            yield segment if text == segment.text and style is segment.style else Segment(text, style)


def table_console() -> Console:
    """Return a console on standard output with the terminal's width; 160 characters in a pipe, which has no width."""
    return Console(width=None if sys.stdout.isatty() else 160)
