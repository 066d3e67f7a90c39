"""Outputs of every command: what cannot be written is refused in one line before the work, not after it."""

from pathlib import Path

import pytest
from tiny_runs import settings, write_config
from typer.testing import CliRunner

from qarl.cli import app
from qarl.errors import UserError

# Where each command's work begins; none of it may be reached.
WORK = (
    "qarl.api.verify_exact",
    "qarl.report.run_report.report_sections",
    "qarl.comparison.compare.train_members",
    "qarl.comparison.compare.build",
    "qarl.exporting.job.open_masters",
)
# Command -> its arguments, {out} standing for the output, and the files and directories that it writes in there.
COMMANDS = {
    "verify-exact": (["verify-exact", "{model}", "--json", "{out}"], None),
    "report": (["report", "{run}", "--out", "{out}"], None),
    "compare": (["compare", "{run}/config.yaml", "--seeds", "0,1", "--out", "{out}"], ("comparison.html", "plots")),
    "compare runs": (["compare", "{run}", "{other}", "--out", "{out}"], ("comparison.json", "plots")),
    "quantize": (["quantize", "{model}", "{out}", "--scheme", "fp8"], (None, None)),
}


@pytest.fixture
def places(tmp_path, tiny_model, monkeypatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    for place in WORK:
        monkeypatch.setattr(place, reached)
    names = {"model": tiny_model("llama")}
    for name in ("run", "other"):
        names[name] = tmp_path / name
        names[name].mkdir()
        write_config(names[name] / "config.yaml", settings(tiny_model("llama")))
        (names[name] / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    return {name: str(path) for name, path in names.items()}


def reached(*arguments: object, **options: object) -> None:
    raise AssertionError("the work was begun")


def obstacles(out: Path, written: tuple[str | None, str | None] | None) -> dict[str, Path]:
    """What stands in the way -> the --out to give."""
    (out.parent / "file").write_text("mine")
    found = {"parent": out.parent / "file" / "out"}
    if written is None:
        out.mkdir()
        return found | {"directory": out}
    found["file"] = out.parent / "file"
    for name, kind in zip(written, ("file", "directory"), strict=True):
        if name is not None:
            folder = out.parent / f"with-{kind}"
            (folder / "configs").mkdir(parents=True)  # by which `compare` knows a directory of its own
            if "comparison.html" not in written:
                (folder / "configs").rmdir()
            found[kind] = folder
            if kind == "file":
                (folder / name).mkdir()
            else:
                (folder / name).write_text("mine")
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_cannot_be_is_refused_before_the_work(command, places, tmp_path):
    arguments, written = COMMANDS[command]
    for what, out in obstacles(tmp_path / "out", written).items():
        before = sorted(tmp_path.rglob("*"))
        done = CliRunner().invoke(app, [text.format(out=out, **places) for text in arguments])
        said = str(done.exception)
        assert isinstance(done.exception, UserError), (what, done.output, done.exception)
        named = out.parent if what == "parent" else out
        assert str(named) in said and "\n" not in said and sorted(tmp_path.rglob("*")) == before, (what, said)
