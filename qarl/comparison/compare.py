"""`qarl compare CONFIG --schemes ...` and `qarl compare RUN RUN ...`. Does not import torch; the members do."""

import shlex
import sys
from pathlib import Path

from qarl.comparison.comparison_page import write_outputs
from qarl.comparison.plan import Member, find_finished, is_complete
from qarl.comparison.progress import ProgressView
from qarl.comparison.space import space_warning
from qarl.comparison.start_members import locked, train_members, write_configs
from qarl.comparison.study import Study
from qarl.comparison.summary import build, print_results
from qarl.errors import UserError
from qarl.inputs.files import Unreadable
from qarl.inputs.json import read_json_object
from qarl.storage.disk import names_in_out, write_json
from qarl.storage.environment import command_line
from qarl.storage.runs import RunRecord, find_runs, read_run

FILES, FOLDERS = ("comparison.json", "comparison.html"), ("plots", "runs", "logs", "configs")
REASONS = {"empty": "no step recorded yet", "running": "still running", "stopped": "not finished"}


def train_and_compare(
    title: str, members: list[Member], out: Path, reuse: list[Path], jobs: int = 1, study: Study | None = None
) -> int:
    """Train the missing members, then write and print the comparison.

    Finished members are not trained again; stopped ones resume from their checkpoint.

    Args:
        title: Title of the page.
        members: Result of `plan` or `plan_study`.
        out: Output directory.
        reuse: Directories that are searched for finished runs of the same configuration.
        jobs: Number of members trained concurrently.
        study: The study that the members are variants of.

    Returns:
        0; 1 if a member failed or was rejected; 128 + the signal number if interrupted.

    Raises:
        UserError: Directories hold other runs. Nothing has been written.
    """
    _check_out(out, own_runs=True)
    own = out / "runs"  # runs of members with previous names, such as before a second seed was added
    roots = [*reuse, own] if own.is_dir() else reuse
    records = [record for root in roots for record in _below(root)]
    not_reused = find_finished(members, records)
    with locked(out), ProgressView(members) as view:
        write_configs(members, out)
        for notice in not_reused:
            view.say(notice)
        for member in members:
            if member.state != "waiting":
                what = f"reused, {member.run_dir}" if member.reused else f"{member.state}: {member.reason}"
                view.say(f"{member.name}: {what}")
        if (line := space_warning(members, out, jobs)) is not None:
            view.say(line)
        signum = train_members(members, out, view, jobs)
        for member in members:
            if member.state == "waiting":
                member.reason = "not started; rerun the same command to resume"
        _conclude(title, members, out, study)
    if signum is not None:
        print(f"interrupted; to resume: {shlex.join(command_line())}", file=sys.stderr)
        return 128 + signum
    return 1 if any(member.state in ("failed", "refused") for member in members) else 0


def compare_runs(run_dirs: list[Path], out: Path) -> int:
    """Compare existing runs of any kind.

    Args:
        run_dirs: Two or more run directories.
        out: Output directory.

    Returns:
        0.

    Raises:
        UserError: Fewer than two runs, a duplicate, a path that is not a run directory, or an unsuitable `out`.
    """
    if len(run_dirs) < 2:
        given = f"{run_dirs[0]} is the only run" if run_dirs else "no runs"
        raise UserError(f"compare: {given}; give two or more")
    for index, path in enumerate(run_dirs):
        if path.resolve() in [other.resolve() for other in run_dirs[:index]]:
            raise UserError(f"compare: {path} is given twice; leave one out")
    names = unique_names(run_dirs)
    members = []
    for name, path in zip(names, run_dirs, strict=True):
        record = read_run(path)
        config = record.config
        member = Member(name, config.quant.scheme, config.quant.learner, config.train.seed, path, config, record.state)
        member.reason = REASONS.get(record.state)
        if record.state == "finished" and not is_complete(record, config):
            member.reason = "the evaluation after its last step is missing"
        members.append(member)
    _check_out(out, own_runs=False)
    with locked(out):
        _conclude(f"Comparison of {len(members)} runs", members, out)
    return 0


def default_out(targets: list[Path]) -> Path:
    """Return runs/compare-STEM for one file, runs/compare-NAME-NAME for run directories."""
    if len(targets) == 1:
        return Path("runs") / f"compare-{targets[0].stem[:100]}"
    return Path("runs") / f"compare-{'-'.join(name.replace('/', '-') for name in unique_names(targets))[:80]}"


def unique_names(paths: list[Path]) -> list[str]:
    """Return the shortest path suffixes that are all different."""
    parts = [path.resolve().parts for path in paths]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def _conclude(title: str, members: list[Member], out: Path, study: Study | None = None) -> None:
    """Read the runs, write comparison.json, the page and the plots, and print the table."""
    records: dict[str, RunRecord] = {}
    for member in members:
        if (member.run_dir / "config.yaml").exists():
            records[member.name] = read_run(member.run_dir)
    comparison = build(title, command_line(), members, records, study)
    write_json(out / "comparison.json", comparison, "--out")
    write_outputs(out, comparison, records)
    print_results(comparison)
    print(f"page: {out / 'comparison.html'}")


def _below(root: Path) -> list[RunRecord]:
    if not root.is_dir():
        raise UserError(f"--reuse: {root}: no such directory; give one that holds runs, such as runs")
    return find_runs(root)[0]


def _check_out(out: Path, own_runs: bool) -> None:
    """Check that `out` is empty or holds a comparison of this kind, whose files may be replaced.

    Args:
        out: Output directory.
        own_runs: Whether members are trained in it; such comparisons always have out/configs.

    Raises:
        UserError: It holds something else.
    """
    names = names_in_out(out, FILES, FOLDERS, "a comparison")
    if names and (own_runs != ("configs" in names) or _kind(out / "comparison.json") not in (None, "runs")):
        raise UserError(f"--out: {out}: holds a comparison of another kind; choose another directory")


def _kind(path: Path) -> str | None:
    try:
        return read_json_object(path, nonfinite=True).get("kind")
    except Unreadable:
        return None
