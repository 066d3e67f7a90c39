"""Experiment trackers behind one interface. A package is imported only if it is configured."""

from __future__ import annotations

import importlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from qarl.errors import UserError
from qarl.inputs.files import read_text
from qarl.storage.disk import atomic_write_text, disk_errors
from qarl.utils.signals import is_stop
from qarl.utils.text import one_line

TRACKERS = ("wandb", "trackio", "mlflow", "swanlab")  # keys of `logging`, equal to package names


class Tracker(ABC):
    """Receives the finite metrics of each step. A tracker that raises is dropped and the run continues."""

    name: str

    @abstractmethod
    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step, counted from 1."""

    def truncate(self, step: int) -> None:
        """Discard values of steps after `step`, from which the run resumes, if the tracker can. Default: do nothing."""
        return

    @abstractmethod
    def close(self) -> None:
        """End the tracker's run."""


def build_trackers(run_dir: Path, logging: Any, config: dict[str, Any] | None) -> list[Tracker]:
    """Start the trackers of the `logging` section.

    Args:
        run_dir: The run directory.
        logging: The `logging` section.
        config: The resolved configuration, which trackers display.

    Raises:
        UserError: A package is missing, or a tracker does not start.
    """
    trackers: list[Tracker] = [TensorBoard(run_dir)] if logging.tensorboard else []
    for kind in (Wandb, Trackio, Mlflow, Swanlab):
        if (options := getattr(logging, kind.name)) is not None:
            trackers.append(kind(run_dir, options, config))
    return trackers


def require_trackers(logging: Any) -> None:
    """Check, without starting a tracker, that all configured packages are installed.

    Raises:
        UserError: A package is not installed.
    """
    for name in ("tensorboard", *TRACKERS):
        if getattr(logging, name):
            _import(name, name)


def _import(module: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = "tensorboard" if key == "tensorboard" else module
        off = "false" if key == "tensorboard" else "null"
        raise UserError(
            f"logging.{key}: {module} cannot be imported ({error}); pip install {package}, or set logging.{key}: {off}"
        ) from error


def _start(key: str, init: Any, **arguments: Any) -> Any:
    try:
        return init(**arguments)
    except BaseException as error:  # trackers raise their own classes for a missing key, no network, a bad project
        if is_stop(error):
            raise
        raise UserError(
            f"logging.{key}: does not start: {one_line(error)}; fix that, or set logging.{key}: null"
        ) from error


def _kept_id(file: Path, make: Callable[[], str]) -> str:
    """Return the tracker's id of the run, which is stored in `file`. If there is none, store the result of `make`."""
    with disk_errors(file):
        if not file.exists():
            atomic_write_text(file, make())
        return read_text(file, limit=1000).strip()


class TensorBoard(Tracker):
    """Event files in `tensorboard/`, opened at the first step, once the step to resume from is known."""

    name = "tensorboard"

    def __init__(self, run_dir: Path) -> None:
        self._module = _import("torch.utils.tensorboard", "tensorboard")
        self._directory = run_dir / "tensorboard"
        self._purge_step: int | None = None
        self._writer: Any = None

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if self._writer is None:
            self._writer = self._module.SummaryWriter(str(self._directory), purge_step=self._purge_step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def truncate(self, step: int) -> None:
        self.close()
        # Makes readers hide events of this and later steps in earlier files. Only needed if any exist.
        self._purge_step = step + 1 if self._directory.exists() else None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _Run(Tracker):
    """Tracker of a package whose `init` starts a run, or resumes it if the arguments name an existing one."""

    def _init(self, options: Any, config: dict[str, Any] | None, **arguments: Any) -> None:
        module = _import(self.name, self.name)
        arguments |= {"project": options.project, "resume": "allow", "config": config}
        self._run = _start(self.name, module.init, **arguments)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class Wandb(_Run):
    """One Weights & Biases run per run directory; its id is stored in `.wandb_id`.

    A resumed run continues it. W&B ignores steps that it already has, so steps that are repeated after resuming keep
    their first values.
    """

    name = "wandb"

    def __init__(self, run_dir: Path, options: Any, config: dict[str, Any] | None) -> None:
        number = _kept_id(run_dir / ".wandb_id", lambda: uuid.uuid4().hex[:12])
        name = options.name or run_dir.name
        self._init(options, config, name=name, mode=options.mode, dir=str(run_dir), id=number)


class Trackio(_Run):
    """One trackio run per run directory, named after it and resumed by its name."""

    name = "trackio"

    def __init__(self, run_dir: Path, options: Any, config: dict[str, Any] | None) -> None:
        self._init(options, config, name=options.name or run_dir.name)


class Mlflow(Tracker):
    """One MLflow run per run directory; its id is stored in `.mlflow_run_id`."""

    name = "mlflow"

    def __init__(self, run_dir: Path, options: Any, config: dict[str, Any] | None) -> None:
        mlflow = _import("mlflow", "mlflow")

        def begin() -> Any:
            if options.tracking_uri is not None:
                mlflow.set_tracking_uri(options.tracking_uri)
            client = mlflow.MlflowClient()
            found = client.get_experiment_by_name(options.project)
            experiment = client.create_experiment(options.project) if found is None else found.experiment_id
            name = options.name or run_dir.name
            run = _kept_id(run_dir / ".mlflow_run_id", lambda: client.create_run(experiment, run_name=name).info.run_id)
            # Written as a file, because MLflow parameters are limited to 6,000 characters, and at every start, because
            # an earlier start may have failed here.
            client.log_dict(run, config or {}, "config.json")
            client.update_run(run, status="RUNNING")
            return client, run

        self._module = mlflow
        self._client, self._run = _start("mlflow", begin)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        metric = self._module.entities.Metric
        self._client.log_batch(self._run, [metric(name, value, now, step) for name, value in metrics.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Swanlab(Tracker):
    """One SwanLab experiment per run directory; its id is stored in `.swanlab_id`."""

    name = "swanlab"

    def __init__(self, run_dir: Path, options: Any, config: dict[str, Any] | None) -> None:
        self._module = _import("swanlab", "swanlab")
        _start(
            "swanlab",
            self._module.init,
            project=options.project,
            experiment_name=options.name or run_dir.name,
            mode=options.mode,
            logdir=str(run_dir / "swanlog"),
            id=_kept_id(run_dir / ".swanlab_id", lambda: uuid.uuid4().hex[:21]),  # SwanLab ids have 21 characters
            resume="allow",
            config=config,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._module.log(metrics, step=step)

    def close(self) -> None:
        self._module.finish()
