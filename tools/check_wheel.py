"""Build a wheel, install it into an empty environment, and use it there: `python tools/check_wheel.py`.

The environment uses the dependencies that are installed in the current one, but nothing of qarl: neither its files nor
an editable install. Exits with 0 if the wheel contains every package with its data, and if `qarl --version`, `schema`,
`check`, `train` on a tiny model and `report` work.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import yaml
from tiny_models import save_tiny_model, tiny_settings

ROOT = Path(__file__).parents[1]
PACKAGES = {"qarl": "qarl", "qarl_kernels": "kernels/qarl_kernels", "qarl_formats": "quant_formats/qarl_formats"}
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
WHERE = """
import qarl, qarl_kernels, qarl_formats
from importlib.metadata import version
from pathlib import Path
assert version("qarl") == qarl.__version__
print(*(Path(p.__file__).resolve().parents[1] for p in (qarl, qarl_kernels, qarl_formats)), sep="\\n")
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="qarl-wheel-") as folder:
        work = Path(folder).resolve()
        wheel = build(work / "dist")
        check_contents(wheel)
        use(install(wheel, work / "environment"), work / "here")
    print(f"{wheel.name}: installed into an empty environment, and used")


def run(*command: object, cwd: Path | None = None) -> str:
    """Run a command and return its standard output. If it fails, end this program with its output."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    kept["OMP_NUM_THREADS"] = "1"
    done = subprocess.run([*map(str, command)], cwd=cwd, env=kept, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def tracked(folder: str) -> list[str]:
    """Return the tracked files below a folder of the repository, relative to it."""
    names = run("git", "ls-files", "-z", cwd=ROOT / folder).split("\0")
    return [name for name in names if name and (ROOT / folder / name).is_file()]


def build(out: Path) -> Path:
    """Build a wheel from a copy of the tracked files, so that a stale build directory cannot add anything."""
    tree = out / "tree"
    for name in tracked("."):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    run(*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, tree)
    (wheel,) = out.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Check that the wheel contains every tracked file of the packages, and no other package."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"{package}/{name}" for package, folder in PACKAGES.items() for name in tracked(folder)}
    strange = {name for name in inside if name.split("/")[0] not in PACKAGES}
    if wrong := sorted((expected - inside) | strange):
        raise SystemExit(f"{wheel.name}: {len(wrong)} files are missing or unexpected, such as {wrong[:3]}")


def install(wheel: Path, environment: Path) -> Path:
    """Create an environment with the wheel, and return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    run(*PIP, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    # A path file adds a directory without reading the path files in it, so an editable install of qarl is not found.
    site = next((environment / "lib").glob("python*")) / "site-packages"
    (site / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return python


def use(python: Path, here: Path) -> None:
    """Run the installed program in a directory without the sources."""
    here.mkdir()
    places = run(python, "-c", WHERE, cwd=here).splitlines()
    if len(places) != len(PACKAGES) or not all(place.startswith(str(python.parents[1])) for place in places):
        raise SystemExit(f"imported from outside the wheel's environment: {places}")
    save_tiny_model(here / "tiny")
    (here / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings(Path("tiny"), train={"steps": 1})))
    for command in ("--version", "schema", "check tiny.yaml", "train tiny.yaml", "report runs/tiny"):
        run(python.with_name("qarl"), *command.split(), cwd=here)
    for name in ("metrics.jsonl", "checkpoints/latest", "report.html"):
        if not (here / "runs/tiny" / name).exists():
            raise SystemExit(f"the run did not write {name}")


if __name__ == "__main__":
    main()
