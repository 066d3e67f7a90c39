"""The sampler's process of asynchronous rollouts: generates continuously while prompts and weights arrive.

Orders are executed in sequence: `add` (prompts), `publish` (weights), `partials` (report unfinished responses). With
`in_flight: wait`, a publish and all orders after it wait until the responses in progress have ended; otherwise these
continue with the new weights. `cancel` (drop responses in progress) overtakes other orders, because a publish may be
waiting for the responses to drop.

A publish has three parts. First tensors are received and verified while generation continues. Then generation pauses
while they are loaded and the loaded weights are verified. Last, the canary is scored between generation steps.

Nothing is loaded from a checkpoint: the first publish sends all tensors.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from qarl.config import Config
from qarl.config.quant import scheme_of
from qarl.config.yaml_io import parse_yaml
from qarl.policy.device import DTYPES, select_algorithms
from qarl.policy.load import load_tokenizer
from qarl.policy.load_config import load_generation_config, load_model_config, plain_config
from qarl.policy.sampler import Sampler
from qarl.rollout.native.engine import Generation, NativeEngine
from qarl.rollout.published_weights import PublishedWeights
from qarl.rollout.sequence import Sequence, uniforms
from qarl.rollout.vllm.channel import Channel, send_failure
from qarl.rollout.vllm.settings import AsyncSettings, Group
from qarl.types import Prompt
from qarl.utils.transfer import synchronized_s
from qarl.weight_sync.snapshot import ModelLayout
from qarl.weight_sync.transport import open_receiver
from qarl.weight_sync.update import WeightUpdate, receive

if TYPE_CHECKING:
    from qarl.rollout.asynchronous.vllm_host import VLLMHost

HEARTBEAT_S = 0.5  # seconds between two `alive` messages


class NativeHost:
    """A native engine in the sampler's process, with weights that the learner publishes.

    Attributes:
        busy_s: Seconds of generation so far.
        in_flight: `rollout.async.in_flight`.
    """

    def __init__(self, settings: AsyncSettings) -> None:
        config = Config.model_validate(parse_yaml(settings.config, "configuration"))
        asynchronous = config.rollout.asynchronous
        assert asynchronous is not None, "the run samples asynchronously"
        self.settings, self.config, self.in_flight = settings, config, asynchronous.in_flight
        self.device = torch.device(settings.device)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        select_algorithms(config.train.deterministic)
        self.tokenizer = load_tokenizer(config.model)
        self._build()
        self.generation: Generation | None = None
        self.busy_s = 0.0
        self._group_of: dict[Sequence, int] = {}  # group number of each response in progress

    def _build(self) -> None:
        config, dtype = self.config, DTYPES[self.config.model.dtype]
        model, context, device = plain_config(load_model_config(config.model)), self.settings.max_length, self.device
        scheme, ignore, fp8 = scheme_of(config.quant), config.quant.ignore, config.quant.kv_cache_dtype == "fp8"
        self.weights = weights = PublishedWeights(model, scheme, ignore, context, dtype, device, fp8)
        layout = ModelLayout(model, load_generation_config(config.model), scheme, ignore, dtype, device, context)
        self.sampler = Sampler(layout, weights.decoder, weights.head_name, kernels=device.type == "cuda")
        self.engine = NativeEngine(self.sampler, self.tokenizer, config.rollout)

    @property
    def busy(self) -> bool:
        """Whether a response is in progress."""
        return self.generation is not None and self.generation.busy

    # --- orders ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def receive(self, update: WeightUpdate, arriving: Any, meanwhile: Callable[[], None]) -> Any:
        """Copy and verify the tensors of a version.

        Args:
            update: The publish.
            arriving: Its tensors and patches, in shared memory.
            meanwhile: Called repeatedly, to generate.

        Returns:
            The tensors, for `publish`.

        Raises:
            PublishError: The tensors differ from those that were sent.
        """
        return receive(update.version, arriving, update.expected, self.weights.base, meanwhile)

    @torch.no_grad()
    def publish(self, update: WeightUpdate, received: Any) -> dict[str, float]:
        """Load the tensors that `receive` returned, and verify the loaded weights. Call `settle` first.

        Returns:
            Seconds of the parts `load` and `check`.

        Raises:
            PublishError: The loaded weights do not match the tensors that were sent.
        """
        begin = time.perf_counter()
        self.weights.load(received)
        if self.generation is None:
            self.sampler.weights = self.weights.weight_set()
        loaded = synchronized_s(self.device)
        self.weights.check(update.version, update.expected)
        checked = synchronized_s(self.device)
        if self.generation is None:
            settings = self.settings
            self.generation = self.engine.begin(settings.sampling, update.version, settings.longest, settings.sequences)
        self.generation.use_version(update.version)
        if self.in_flight == "recompute_kv":
            self.generation.recompute()
        return {"load": loaded - begin, "check": checked - loaded}

    def score(self, canary: Iterable[list[int]], meanwhile: Callable[[], None]) -> list[list[float]]:
        """Return the log-probs of each token sequence. meanwhile: called after each sequence, to generate."""
        scores = []
        for tokens in canary:
            scores.append(self.sampler.score([tokens]).tolist())
            meanwhile()
        return scores

    def add(self, groups: list[Group]) -> None:
        """Queue responses; those that already have tokens continue."""
        assert self.generation is not None, "the first order is a publish"
        limit = self.settings.sampling.max_response_length
        for group in groups:
            prompt = Prompt(group.prompt_id, group.token_ids, "")
            fresh = [sample for sample in group.samples if sample not in group.partial]
            sequences = self.generation.add(prompt, fresh, group.seed) if fresh else []
            for sample, (tokens, logprobs, versions) in group.partial.items():
                points = uniforms(group.seed, prompt.id, sample, limit)
                sequence = Sequence(prompt, sample, points, list(tokens), list(logprobs), list(versions))
                self.generation.resume(sequence)
                sequences.append(sequence)
            self._group_of |= dict.fromkeys(sequences, group.number)

    def cancel(self, groups: list[int]) -> None:
        """Drop the responses in progress of these groups. Call `settle` first."""
        gone = {sequence for sequence, group in self._group_of.items() if group in groups}
        if gone:
            assert self.generation is not None
            self.generation.cancel(gone)
            for sequence in gone:
                del self._group_of[sequence]

    def partials(self) -> list[tuple[int, int, list[int], list[float], list[int]]]:
        """Return (group, sample, token ids, log-probs, versions) of each unfinished response with tokens."""
        found = ((s, group) for s, group in self._group_of.items() if s.response)
        return [(group, s.sample, s.response, s.logprobs, s.versions) for s, group in found]

    # --- generation --------------------------------------------------------------------------------------------

    def step(self) -> list[tuple[Any, ...]]:
        """Run a step.

        Returns:
            (group, sample, token ids, log-probs, finish reason, text, versions, routing) of each response that ended.
            routing: (dtype, shape, bytes) of `Rollout.routing`; None if not recorded.
        """
        assert self.generation is not None
        begin = time.perf_counter()
        extended = self.generation.step()
        self.busy_s += time.perf_counter() - begin
        return self._ended(extended)

    def settle(self) -> list[tuple[Any, ...]]:
        """Read the tokens of the step in flight, before weights change. Returns as `step`."""
        return [] if self.generation is None else self._ended(self.generation.settle())

    def _ended(self, extended: list[Sequence]) -> list[tuple[Any, ...]]:
        assert self.generation is not None
        found = []
        for s in extended:
            if s.finish_reason is None:
                continue
            routing, experts = None, self.generation.rollout(s, 0).routing
            if experts is not None:
                routing = str(experts.dtype).removeprefix("torch."), list(experts.shape), experts.numpy().tobytes()
            group = self._group_of.pop(s)
            found.append((group, s.sample, s.response, s.logprobs, s.finish_reason, s.text, s.versions, routing))
        return found


class Server:
    """Executes the orders of one learner, and generates in between.

    Args:
        channel: Connection to the learner.
        host: The engine that generates.
        receiver: Receives the tensors of publishes, see `open_receiver`.
    """

    def __init__(self, channel: Channel, host: NativeHost | VLLMHost, receiver: Any) -> None:
        self._channel, self._host, self._receiver = channel, host, receiver
        self._orders: deque[tuple[str, Any]] = deque()
        self._last_heartbeat = time.monotonic()
        self._received: tuple[Any, float] | None = None  # tensors of the next publish, and seconds to receive them

    def run(self) -> None:
        """Serve until the learner closes the connection (EOFError)."""
        while True:
            idle = not self._host.busy and not self._orders
            while (order := self._channel.poll(HEARTBEAT_S if idle else 0.0)) is not None:
                if order[0] == "cancel":
                    self._send_finished(self._host.settle())
                    self._host.cancel(order[1])
                else:
                    self._orders.append(order)
                idle = False
            if self._orders and self._orders[0][0] == "publish" and self._received is None:
                self._receive(self._orders[0][1])
            if self._orders and not (self._orders[0][0] == "publish" and self._waits):
                self._perform(*self._orders.popleft())
            else:
                self._generate()
            self._heartbeat()

    @property
    def _waits(self) -> bool:
        """Whether a publish must wait for the responses in progress."""
        return self._host.in_flight == "wait" and self._host.busy

    def _perform(self, operation: str, payload: Any) -> None:
        host = self._host
        if operation == "add":
            host.add(payload)
        elif operation == "partials":
            self._send_finished(host.settle())
            self._channel.send("partials", host.partials())
        else:
            assert operation == "publish", operation
            self._publish(payload)

    def _receive(self, update: WeightUpdate) -> None:
        begin = time.perf_counter()
        tensors = self._host.receive(update, self._receiver.take(update.payloads[0]), self._generate)
        self._received = tensors, time.perf_counter() - begin

    def _publish(self, update: WeightUpdate) -> None:
        host = self._host
        assert self._received is not None, "`run` receives first"
        (tensors, receive_s), self._received = self._received, None
        self._send_finished(host.settle())
        begin = time.perf_counter()
        try:
            seconds = host.publish(update, tensors)
        finally:
            del tensors
            self._receiver.done()
        pause_s = time.perf_counter() - begin
        scores = host.score(update.canary, self._generate)
        score_s = time.perf_counter() - begin - pause_s
        self._channel.send(
            "published", (update.version, pause_s, {"receive": receive_s, **seconds, "score": score_s}, scores)
        )

    def _generate(self) -> None:
        """Run one generation step if a response is in progress."""
        if self._host.busy:
            self._send_finished(self._host.step())
            self._heartbeat()

    def _send_finished(self, finished: list[tuple[Any, ...]]) -> None:
        if finished:
            self._channel.send("finished", (finished, self._host.busy_s))

    def _heartbeat(self) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat >= HEARTBEAT_S:
            self._last_heartbeat = now
            self._channel.send("alive", self._host.busy_s)


def serve(channel: Channel, build: Callable[[], NativeHost | VLLMHost], receiver: Any) -> None:
    """Build the host, report that it is ready, and serve the learner until it is gone. Failures are sent to it."""
    try:
        host = build()
        channel.send("done")
        Server(channel, host, receiver).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # whatever the model, the device or a kernel raises
        send_failure(channel, error)


def main(descriptor: int) -> None:
    """Serve the learner at the other end of the connection `descriptor`, until it is gone."""
    channel = Channel(socket.socket(fileno=descriptor))
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the learner is gone
        order = channel.poll(None)
        assert order is not None and order[0] == "start", "the first order is `start`"
        settings, plan = order[1]
        serve(channel, partial(NativeHost, settings), open_receiver(plan))
