"""`qarl train --nproc` in a process that starts its ranks as forks of itself."""

from pathlib import Path

import forked_popen

from qarl.cli import launch


def install(first: str = "") -> None:
    """Let the launcher of this process start forks. first: statements that each rank runs first."""
    forked_popen.install(launch)
    launch._BOOT = launch._BOOT.replace("from qarl", f"{first}; from qarl" if first else "from qarl", 1)


def before(first: Path | None = None) -> str:
    """Python for a process that runs `qarl train --nproc`. first: Python file that each rank runs first."""
    here = str(Path(__file__).parent)
    run = f"exec(compile(open({str(first)!r}).read(), {str(first)!r}, 'exec'), {{}})" if first else ""
    return f"import sys; sys.path.append({here!r}); import forked_launch; forked_launch.install({run!r})"
