"""Run `qarl train --nproc` in a process that starts its ranks as forks of itself."""

from pathlib import Path

import forked_popen

from qarl.cli import launch


def install(first: str = "") -> None:
    """Let the launcher in this process start ranks as forks. first: Statements that each rank runs first."""
    forked_popen.install(launch)
    launch._BOOT = launch._BOOT.replace("from qarl", f"{first}; from qarl" if first else "from qarl", 1)


def before(first: Path | None = None) -> str:
    """Return Python code for a process that runs `qarl train --nproc`. first: Python file that each rank runs first."""
    here = str(Path(__file__).parent)
    run = f"exec(compile(open({str(first)!r}).read(), {str(first)!r}, 'exec'), {{}})" if first else ""
    return f"import sys; sys.path.append({here!r}); import forked_launch; forked_launch.install({run!r})"
