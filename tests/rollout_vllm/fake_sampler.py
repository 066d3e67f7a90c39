"""A sampler's process that starts fast and has the faults that a test requests.

It runs the real worker loop in a fork of the test's process, with a host that samples uniformly instead of vLLM. The
engine argument `troubles` names a file of lines `OPERATION TROUBLE`. When the operation of the first line runs, the
line is removed and its trouble happens. Every process appends its pid to a file with the suffix `.pids`.
"""

import math
import os
import pickle
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import forked_worker
from safetensors import safe_open
from torch import Tensor

from qarl.rollout.engine import Progress, SamplingParams
from qarl.rollout.vllm import process
from qarl.rollout.vllm.channel import HEADER
from qarl.rollout.vllm.host import Host
from qarl.rollout.vllm.phases import Phases
from qarl.rollout.vllm.settings import InFlight, Request, Response, SamplerSettings
from qarl.weight_sync.fingerprints import Fingerprint, fingerprints, verify
from qarl.weight_sync.update import PATCH, patched

VOCABULARY = 259
EVEN = -math.log(VOCABULARY)
SLOTS = 8  # requests that get a token in a step


def settings(folder: Path) -> SamplerSettings:
    """Return the settings of a sampler without a policy. folder: Contains its checkpoint and its `troubles`."""
    return SamplerSettings(
        checkpoint=folder, arguments={"troubles": str(folder / "troubles")}, numerics="fast", on_gpu=False
    )


class FakeHost:
    """Replaces `qarl.rollout.vllm.host.Host`: stores and verifies tensors, but samples uniformly whatever they are."""

    execute = Host.execute

    def __init__(
        self, settings: SamplerSettings, expected: Mapping[str, Fingerprint], phases: Phases | None = None
    ) -> None:
        self._troubles = Path(settings.arguments["troubles"])
        with self._troubles.with_suffix(".pids").open("a") as pids:
            pids.write(f"{os.getpid()}\n")
        self._offset = self._pace = 0.0
        self._endless = False
        self._streams: dict[str, tuple[Response, int]] = {}  # requests in progress: the response, and its tokens so far
        self._ended: list[tuple[str, Response]] = []
        self.publishes: list[tuple[int, str]] = []  # version, and what happened to requests in progress
        self.tensors: dict[str, Tensor] = {}
        self._trouble("start")
        for path in settings.checkpoint.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                self.tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        verify(0, expected, fingerprints(self.tensors.items()))

    @staticmethod
    def import_ahead(exact: bool) -> None:
        pass

    def capabilities(self) -> dict[str, Any]:
        return {"version": "fake", "proved_frac": 1.0, "notes": [], "phases": {}}

    def publish(
        self,
        version: int,
        arriving: Iterable[tuple[str, Tensor]],
        expected: Mapping[str, Fingerprint],
        in_flight: InFlight = "wait",
    ) -> dict[str, float]:
        assert in_flight != "wait" or not self._streams, "vLLM could not empty its cache"
        self.publishes.append((version, in_flight))
        self._offset = 0.0
        for name, tensor in arriving:
            self._trouble("publish")
            held = name.removesuffix(PATCH)
            self.tensors[held] = tensor.clone() if held == name else patched(self.tensors[held], tensor)
        verify(version, expected, fingerprints(self.tensors.items()))
        return {}

    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        self._advance()  # requests in progress continue meanwhile
        return [[EVEN + self._offset] * (len(tokens) - 1) for tokens in sequences]

    def add(self, name: str, request: Request, sampling: SamplingParams) -> None:
        assert name not in self._streams
        self._streams[name] = _draw(request, sampling), 0

    def step(self) -> list[tuple[str, Response]]:
        self._advance()
        return self.drain()

    def drain(self) -> list[tuple[str, Response]]:
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, names: list[str]) -> None:
        for name in names:
            del self._streams[name]

    def partial_outputs(self) -> Iterator[tuple[str, int, Callable[[], tuple[list[int], list[float]]]]]:
        for name, (response, count) in self._streams.items():
            yield name, count, partial(_first, response, count)

    def _advance(self) -> None:
        """Add a token to each of the first `SLOTS` requests in progress."""
        self._trouble("step")
        time.sleep(self._pace)
        for name, (response, count) in list(self._streams.items())[:SLOTS]:
            if count + 1 < len(response.token_ids):
                self._streams[name] = response, count + 1
            else:
                del self._streams[name]
                self._ended.append((name, response))

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, progress: Progress) -> list[Response]:
        """Generate one response after another. A trouble happens after the first response."""
        responses, tokens = [], 0
        for request in requests:
            responses.append(_draw(request, sampling))
            tokens += len(responses[-1].token_ids)
            time.sleep(self._pace)
            progress(len(responses), tokens)
            if len(responses) == 1:
                self._trouble("generate")
            while self._endless:
                time.sleep(0.02)
                progress(len(responses), tokens)
        return responses

    def sleep(self, level: int) -> int | None:
        self._freed = None
        with self._troubles.with_suffix(".sleeps").open("a") as sleeps:
            sleeps.write(f"{level}\n")
        self._trouble("sleep")
        return self._freed

    def wake(self) -> None:
        with self._troubles.with_suffix(".wakes").open("a") as wakes:
            wakes.write("woken\n")
        self._trouble("wake")

    def _trouble(self, operation: str) -> None:
        lines = self._troubles.read_text().splitlines()
        if not lines or lines[0].split()[0] != operation:
            return
        self._troubles.write_text("\n".join(lines[1:]))
        match lines[0].split()[1]:
            case "none":
                pass
            case "frees":
                self._freed = int(lines[0].split()[2])
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "hang":
                self._troubles.with_suffix(f".{os.getpid()}.hangs").touch()
                time.sleep(600)
            case "slow":
                self._pace = 0.05
            case "endless":  # generates until it is interrupted
                self._endless = True
            case "fail":
                raise RuntimeError("out of blocks\nand a second line")
            case "measure":
                raise AssertionError("Error in memory profiling. Initial free memory 1.0 GiB, current 2.0 GiB.")
            case "noise":
                os.write(1, b"noise from a library\n")
                os.write(2, b"and on the other stream\n")
            case "rubbish":
                with socket.socket(fileno=os.dup(int(sys.argv[1]))) as connection:
                    connection.sendall(rubbish()[lines[0].split()[2]])
                time.sleep(600)
            case "lie":
                self._offset = 1.0  # error of the canary's log-probs until the next publish
            case other:
                raise AssertionError(f"no trouble {other!r}")


def frame(message: object) -> bytes:
    """Return the bytes that a channel sends for a message."""
    data = pickle.dumps(message)
    return HEADER.pack(len(data)) + data


def rubbish() -> dict[str, bytes]:
    """Return invalid bytes that a broken sampler may send, by name."""
    return {
        "noise": random.Random(14).randbytes(4096),
        "code": frame(("done", os.system)),
        "unknown": frame(("\x1b[31mevil", None)),
    }


def _first(response: Response, count: int) -> tuple[list[int], list[float]]:
    return response.token_ids[:count], response.logprobs[:count]


def _draw(request: Request, sampling: SamplingParams) -> Response:
    stream = random.Random(request.seed)
    length = stream.randint(1, sampling.max_response_length)
    tokens = [stream.randrange(3, VOCABULARY) for _ in range(length)]
    if length == sampling.max_response_length:
        return Response(tokens, [EVEN] * length, "length", None)
    (stop,) = sampling.stop_token_ids
    return Response([*tokens[:-1], stop], [EVEN] * length, "stop", stop)


def install(replace=setattr) -> None:
    """Make `SamplerProcess` start forks with a `FakeHost`. replace: `monkeypatch.setattr` in a test."""
    forked_worker.install(FakeHost, replace)


def limit_only_hangs(folder: Path, replace=setattr) -> None:
    """Apply `timeout_s` only after the trouble `hang`, so that a slow machine is not taken for a hang.

    folder: Folder of the troubles. replace: See `install`.
    """
    poll = process.SamplerProcess.poll

    def patient(sampler: process.SamplerProcess, seconds: float) -> bool:
        if not list(folder.glob(f"*.{sampler.pid}.hangs")):
            sampler._deadline = math.inf
        elif sampler._deadline == math.inf:
            sampler._deadline = time.monotonic() + sampler.timeout_s
        return poll(sampler, seconds)

    replace(process.SamplerProcess, "poll", patient)


def pids(troubles: Path) -> list[int]:
    """Return the pids of the samplers started so far, in order."""
    path = troubles.with_suffix(".pids")
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended between open and read
        return False


def gone(pid: int, within_s: float = 60.0) -> bool:
    """Wait up to `within_s` seconds for the end of a process. Returns whether it ended."""
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


def memory_files() -> int:
    """Return the number of open memory files of transports in this process."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return sum("qarl-publish" in link for link in links)
