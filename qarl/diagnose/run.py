"""`qarl diagnose`: diagnose a step of a run and write RUN/diagnose/NNNNNN/ (diagnosis.json, index.html, plots/)."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from qarl.batch.saved import pick_step, read_rollouts
from qarl.diagnose.diagnosis_page import diagnosis_sections
from qarl.diagnose.measure import Diagnosis, diagnose
from qarl.diagnose.policies import RunPolicy
from qarl.diagnose.reading import Finding, read
from qarl.errors import UserError
from qarl.inference.target import resolve_target
from qarl.report.page import write_page
from qarl.report.run_report import check_replaceable
from qarl.storage.disk import names_in_out
from qarl.storage.names import checkpoint_steps
from qarl.storage.runs import read_run

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Diagnosed:
    """A diagnosis, its findings, and the path of the page that shows them."""

    diagnosis: Diagnosis
    findings: list[Finding]
    page: Path


def diagnose_run(
    run: Path,
    *,
    step: int | None,
    device: str,
    gradients: bool,
    out: Path | None,
    model: str | None,
    say: Callable[[str], None],
) -> Diagnosed:
    """Diagnose a step and write the results. The run's own files are not changed.

    Args:
        run: The run directory.
        step: The step. None: the last step with both rollouts and a checkpoint.
        device: auto, cpu or cuda.
        gradients: Also measure gradients/*.
        out: Output directory; default RUN/diagnose/NNNNNN.
        model: Path of the base model, if it was moved.
        say: Called with a line before each slow part.

    Raises:
        UserError: A file is missing or damaged. Checked before the model is loaded if possible.
    """
    record = read_run(run)
    chosen = pick_step(run, step)
    saved = read_rollouts(run, chosen)
    if saved.versions is not None:
        raise UserError(
            f"--step: step {chosen} has tokens from earlier policy versions, whose weights are not in the checkpoint; "
            "give a step of a synchronous run"
        )
    target = resolve_target(str(run), step=chosen, model=model)
    directory = run / "diagnose" / f"{chosen:06d}" if out is None else out
    names_in_out(directory, ("diagnosis.json", "index.html"), ("plots",), "a diagnosis")
    check_replaceable(directory / "index.html")
    previous = chosen - 1 in checkpoint_steps(run / "checkpoints")
    history = [row for row in record.metrics if row["step"] <= chosen]
    say("model")
    diagnosis = diagnose(RunPolicy(target, device), saved, previous, gradients, history, say)
    findings = read(diagnosis.metrics)
    return Diagnosed(diagnosis, findings, _write(directory, run, diagnosis, findings))


def _write(directory: Path, run: Path, diagnosis: Diagnosis, findings: list[Finding]) -> Path:
    contents = {
        "format_version": FORMAT_VERSION,
        "step": diagnosis.step,
        "findings": [asdict(finding) for finding in findings],
        "left_out": diagnosis.left_out,
        "record": diagnosis.record,
    }
    text = json.dumps(contents, indent=1, allow_nan=False) + "\n"
    page = directory / "index.html"
    write_page(
        page,
        f"Step {diagnosis.step} of {run.resolve().name}",
        "qarl diagnose: log-probs recomputed with the weights after the step",
        diagnosis_sections(diagnosis, findings),
        beside={directory / "diagnosis.json": text.encode()},
    )
    return page
