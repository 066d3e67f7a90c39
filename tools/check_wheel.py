"""Builds a wheel, installs it into an empty environment, and uses it there: `python tools/check_wheel.py`.

The environment borrows what qarl depends on from the one that runs this, and nothing of qarl: neither its files nor an
editable install of it. Exits with 0 if the wheel holds every package with its data, and if `qarl --version`, `schema`,
`check`, `train` on a tiny model and `report` do what they should.
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

WHERE = """
import qarl, qarl_kernels, qarl_formats
from importlib.metadata import version
from pathlib import Path
assert version("qarl") == qarl.__version__
print(*(Path(p.__file__).resolve().parents[1] for p in (qarl, qarl_kernels, qarl_formats)), sep="\\n")
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="qarl-wheel-") as folder:
        work = Path(folder)
        wheel = build(work / "dist")
        check_contents(wheel)
        python = install(wheel, work / "environment")
        use(python, work)
    print(f"{wheel.name}: installed into an empty environment, and used")


def run(*command: object, cwd: Path | None = None, **environment: str) -> str:
    """Standard output; ends the program with what was printed if the command fails."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=kept | environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(out: Path) -> Path:
    """The wheel of the working tree, from a copy of the tracked files: a stale build directory adds nothing to it."""
    tree = out / "tree"
    tree.mkdir(parents=True)
    files = [name for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0") if name and (ROOT / name).is_file()]
    for name in files:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, tree)
    (wheel,) = out.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Every tracked file of the packages is in the wheel, and no other package."""
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    expected = set()
    for package, folder in PACKAGES.items():
        for name in run("git", "ls-files", "-z", folder, cwd=ROOT).split("\0"):
            if name and (ROOT / name).is_file():
                expected.add(f"{package}/{Path(name).relative_to(folder)}")
    if missing := sorted(expected - inside):
        raise SystemExit(f"{wheel.name}: {len(missing)} files are missing, such as {missing[:3]}")
    metadata = f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"
    if strange := sorted({name.split("/")[0] for name in inside} - set(PACKAGES) - {metadata}):
        raise SystemExit(f"{wheel.name}: holds {strange}, which is none of its packages")


def install(wheel: Path, environment: Path) -> Path:
    """A new environment with the wheel; its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel)
    # A path file adds a directory and does not read the path files in it, so an editable qarl there stays unknown.
    site = next((environment / "lib").glob("python*")) / "site-packages"
    (site / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return python


def use(python: Path, work: Path) -> None:
    """Run the installed program in a directory without the sources."""
    here = work / "here"
    here.mkdir()
    own = str((work / "environment").resolve())
    places = run(python, "-c", WHERE, cwd=here).splitlines()
    if len(places) != len(PACKAGES) or not all(place.startswith(own) for place in places):
        raise SystemExit(f"imported from elsewhere than the wheel: {places}")
    qarl = python.with_name("qarl")
    version = run(qarl, "--version", cwd=here).strip()
    if f"qarl-{version}-" not in next((work / "dist").glob("*.whl")).name:
        raise SystemExit(f"qarl --version says {version}")
    run(qarl, "schema", cwd=here)
    save_tiny_model(here / "tiny")
    (here / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings(Path("tiny"), train={"steps": 1})))
    run(qarl, "check", "tiny.yaml", cwd=here)
    run(qarl, "train", "tiny.yaml", cwd=here, OMP_NUM_THREADS="1")
    run(qarl, "report", "runs/tiny", cwd=here)
    for name in ("metrics.jsonl", "checkpoints/latest", "report.html"):
        if not (here / "runs/tiny" / name).exists():
            raise SystemExit(f"the run left no {name}")


if __name__ == "__main__":
    main()
