"""rich's console for texts from outside: no markup, and control characters as escapes wherever they stand."""

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
    """rich's own, in which a name that looks like markup, a link or an escape sequence is shown as it is spelled.

    file: the stream; default standard output, or with `stderr` standard error, as they are now. options: rich's.
    """

    def __init__(self, file: TextIO | None = None, *, stderr: bool = False, **options: Any) -> None:
        stream: Any = file or (sys.stderr if stderr else sys.stdout)
        if isinstance(stream, InertStream):
            stream = stream.outlet  # the colours and the movements of the cursor are rich's
        super().__init__(file=stream, markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style = segment.text, segment.style
            if style is not None and style.link:  # of what a library printed while a live display took it in
                style = style.update_link(None)
            if not segment.control:
                text = visible(text, keep_newlines=True)
            yield segment if text == segment.text and style is segment.style else Segment(text, style)
