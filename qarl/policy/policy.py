"""The policy: master weights, their snapshot, and the forwards of learner, sampler, shadow and reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain, compress

import torch
from qarl_formats.scheme import Scheme, is_ignored
from qarl_kernels.attention import PAGE
from qarl_kernels.logprob import Truncation, logits_of, token_logprobs
from torch import Tensor, nn
from transformers import PreTrainedModel

from qarl.config import QuantConfig
from qarl.config.architecture import unserved_heads
from qarl.distributed.rows import RowPlan, plan_of
from qarl.errors import UserError
from qarl.policy.attention import pack, packed
from qarl.policy.decoder import Decoder
from qarl.policy.device import use_kernels
from qarl.policy.experts import move_experts
from qarl.policy.kept import KeptVersions
from qarl.policy.linear import WeightSet, sum_of
from qarl.policy.modules import check_family, check_norms
from qarl.policy.routes import NO_ROUTES, ExpertLayer, Routes
from qarl.policy.sampler import Sampler
from qarl.policy.skeleton import check_shapes, linear_names
from qarl.policy.teacher import Comparison
from qarl.policy.weights import learner_weights, sampler_weights
from qarl.utils.transfer import upload
from qarl.weight_sync.codes import quantize_parameters
from qarl.weight_sync.snapshot import ModelLayout, Snapshot

# On a GPU a packed batch of more than FEW_ROWS rows is padded to a multiple of ROWS: cuBLAS multiplies whole tiles of
# rows faster in the weight gradients, and the allocator sees fewer different sizes.
ROWS, FEW_ROWS = 256, 4096


class Policy:
    """A Hugging Face causal LM whose layers qarl runs.

    Args:
        model: The masters. May be a `skeleton` without values if `snapshot` is given: for inference, or for a learner
            whose masters are sharded and that passes their snapshots to `take`.
        scheme: Quantization scheme of the linear layers.
        quant: What is quantized, and how the learner reads it.
        dtype: Compute dtype of the sampler's forward, and of published tensors that are not quantized.
        device: Device of masters, snapshots and forwards.
        max_length: Maximum tokens of prompt and response; None: the model's number of positions.
        snapshot: The current version; None: quantize the masters as version 0.
        learner_dtype: Compute dtype of the learner's forward; None: `dtype`.
        values: See `take`.

    Attributes:
        current: The snapshot of the masters at `version`; `refresh` makes a new one after an optimizer step.
        weights: The learner's weight set for it.
        reference: The learner's weight set of an earlier version, see `keep_reference`; None if nothing was kept.
        kept: Versions that waiting responses of asynchronous rollouts were sampled with.
        sampler: The forward for rollout engines; `install` switches it to a published snapshot.
        aligned: Whether learner and sampler share one forward and weight set.
        kernels: Whether quantization, products and output layer run on Triton kernels.

    Raises:
        UserError: qarl cannot run this model or scheme.
    """

    weights: WeightSet

    def __init__(
        self,
        model: PreTrainedModel,
        scheme: Scheme,
        quant: QuantConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_length: int | None = None,
        snapshot: Snapshot | None = None,
        learner_dtype: torch.dtype | None = None,
        values: Mapping[str, Tensor] | None = None,
    ) -> None:
        check_family(model.config)
        self.scheme, self.quant, self.dtype, self.device = scheme, quant, dtype, device
        self.learner_dtype = learner_dtype or dtype
        self.aligned = quant.learner == "aligned"
        self.kernels = use_kernels(quant, scheme, dtype, device)
        self.max_length = max_length or model.config.max_position_embeddings
        self.config, self.model = model.config, model
        self._check()
        self.linears = {name: model.get_submodule(name) for name in linear_names(model)}
        self.head_master: nn.Parameter = model.get_output_embeddings().weight
        self.tied = self.head_master is model.get_input_embeddings().weight
        if snapshot is None:
            move_experts(model, device)
            self.model = model.to(device)  # type: ignore[arg-type]  # its decorator hides its parameters
        positions, dtypes = -(-self.max_length // PAGE) * PAGE, {dtype, self.learner_dtype}
        how = quant.ste_input == "dequantized", quant.backward
        self.decoder = Decoder(self.model.base_model, positions, dtypes, device, *how)
        if self.kernels and (reason := unserved_heads(self.decoder.layers[0].head_dim)):
            raise UserError(f"model.path: the model {reason}")
        self.head_name = next(name for name, parameter in self.named_parameters() if parameter is self.head_master)
        self.reference: WeightSet | None = None
        self.kept = KeptVersions(self, on_host=False)
        generation = getattr(model, "generation_config", None)
        layout = ModelLayout(model.config, generation, scheme, quant.ignore, dtype, device, self.max_length)
        self.sampler = Sampler(layout, self.decoder, self.head_name, self.kernels)
        if snapshot is None:
            self.refresh(version=0)
        else:
            self.take(snapshot, values)
        self.sampler.install(self.current)

    def _check(self) -> None:
        """Raise UserError if the policy cannot run the model."""
        quant, config = self.quant, self.config
        if self.aligned and self.learner_dtype != self.dtype:
            raise UserError(
                f"model.learner_dtype: an aligned learner computes in the sampler's {self.dtype}; leave null, "
                "or use quant.learner: full_precision"
            )
        limit = config.max_position_embeddings
        if self.max_length > limit:
            raise UserError(f"model.max_length: {self.max_length} is above the model's {limit} positions; lower it")
        if self.model.get_output_embeddings().bias is not None:
            raise UserError("model.path: an output layer with a bias is not supported")
        if not is_ignored("lm_head", quant.ignore):
            raise UserError(f"quant.ignore: {quant.ignore} must contain lm_head: the output layer is never quantized")
        check_shapes(self.model, self.scheme, quant.ignore)
        check_norms(self.model)

    @property
    def version(self) -> int:
        """Version of the current parameters: optimizer steps taken."""
        return self.current.version

    @property
    def experts(self) -> list[ExpertLayer]:
        """Return the mixtures of experts by layer; empty if there are none."""
        return [layer.experts for layer in self.decoder.layers if layer.experts is not None]

    # --- masters and snapshots ---------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the float32 masters by Hugging Face name; tied weights once."""
        return self.model.named_parameters()

    def quantized(self, module: str) -> bool:
        return self.scheme.quantized and module in self.linears and not is_ignored(module, self.quant.ignore)

    @torch.no_grad()
    def refresh(self, version: int, values: Mapping[str, Tensor] | None = None) -> Snapshot:
        """Quantize the masters once, as policy `version`, and let the learner's forward read the result.

        Sampler and reference keep their versions.

        Args:
            version: Optimizer steps taken.
            values: Master weights by name, fetched lazily. Required if the policy's parameters are placeholders.

        Raises:
            UserError: A master is not finite; names the tensor.
        """
        masters = dict(self.named_parameters()) if values is None else values
        how = self._plan, self.scheme_of, self.dtype, version, self.kernels
        self.take(quantize_parameters(masters, *how), values)
        return self.current

    @cached_property
    def _plan(self) -> RowPlan:
        """All rows of the masters on one rank."""
        return plan_of({name: master.shape for name, master in self.named_parameters()}, self.scheme_of, 1)

    def take(self, snapshot: Snapshot, values: Mapping[str, Tensor] | None = None) -> None:
        """Make a snapshot the current version, which the learner's forward reads and the sampler may install.

        Args:
            snapshot: Snapshot of the current masters.
            values: Master weights by name, of a dtype at least as fine as the learner's. Required if the policy's
                parameters are placeholders and its learner is not aligned.
        """
        self.current = snapshot
        self.weights = learner_weights(self, snapshot, dict(self.named_parameters()) if values is None else values)
        self._shadow: WeightSet | None = None
        self.sampler.offer(snapshot, lambda: self.shadow)

    def scheme_of(self, name: str) -> Scheme | None:
        """Return the scheme of a parameter; None if it is not quantized."""
        return self.scheme if name.endswith(".weight") and self.quantized(name.removesuffix(".weight")) else None

    @property
    def shadow(self) -> WeightSet:
        """Return the current version in the sampler's arithmetic, published or not. Created lazily.

        Gradients go straight through to the masters, as the learner's do.
        """
        if self.aligned:
            return self.weights
        if self._shadow is None:
            self._shadow = sampler_weights(self, self.current, self.weights)
        return self._shadow

    def keep_reference(self) -> None:
        """Keep the learner's current weights as the reference; later versions do not change it."""
        self.reference = self.weights

    # --- forwards ----------------------------------------------------------------------------------------------

    def logprobs(
        self,
        prompts: list[list[int]],
        responses: list[list[int]],
        truncation: Truncation,
        chunk: int,
        retained: list[Tensor] | None = None,
        routes: Routes = NO_ROUTES,
        weights: WeightSet | None = None,
        written: list[list[bool]] | None = None,
        comparison: Comparison | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs of response tokens in one forward over all sequences.

        Args:
            prompts: Token ids, at least one each. Neighbours with the same prompt share its forward, which does not
                change a bit of the result.
            responses: Token ids, at least one each, one response per prompt.
            truncation: Truncation of the distribution. A token outside has logp -inf and gives no gradient.
            chunk: Rows of logits in memory at once.
            retained: See `token_logprobs`.
            routes: Routing of the rows, in the layout of `qarl.policy.attention.pack`.
            weights: Weights of the version that runs. None: the learner's.
            written: Which response tokens have a log-prob; None: all.
            comparison: Receives the divergence from a teacher at each response token.

        Returns:
            logp (T,) and entropy (T,), float32, in nats, with gradient to the masters.
        """
        weights = weights or self.weights
        hidden = self.predicting_states(prompts, responses, routes, weights, written)
        tokens = [token for response in responses for token in response]
        if written is not None:
            tokens = list(compress(tokens, chain.from_iterable(written)))
        targets = upload(torch.tensor(tokens, dtype=torch.int64), self.device)
        into = sum_of if weights.fused else None
        if comparison is not None:
            comparison.run(self, weights, hidden, prompts, responses, written, chunk, into)
        how = truncation, chunk, self.kernels, retained, into
        return token_logprobs(hidden, self.head_master, weights.head, targets, *how)

    @torch.no_grad()
    def top_tokens(
        self,
        prompts: list[list[int]],
        responses: list[list[int]],
        chunk: int,
        routes: Routes = NO_ROUTES,
        weights: WeightSet | None = None,
        written: list[list[bool]] | None = None,
    ) -> Tensor:
        """Return the most likely token at the position of each response token, (T,) int64. Same forward as
        `logprobs`.
        """
        weights = weights or self.weights
        hidden = self.predicting_states(prompts, responses, routes, weights, written)
        parts = [
            logits_of(hidden[start : start + chunk], weights.head, self.kernels).argmax(-1)
            for start in range(0, hidden.shape[0], chunk)
        ]
        return torch.cat(parts)

    def predicting_states(
        self,
        prompts: list[list[int]],
        responses: list[list[int]],
        routes: Routes = NO_ROUTES,
        weights: WeightSet | None = None,
        written: list[list[bool]] | None = None,
    ) -> Tensor:
        """Return the final hidden state that predicts each response token: (T, H), in the order of `logprobs`."""
        weights = weights or self.weights
        batch = pack(prompts, responses, written)
        groups, ids, count = batch.groups, batch.ids, len(batch.ids)
        assert routes.replay is None or len(routes.replay) == count, f"the replay does not have {count} rows"
        if weights.fused and len(ids) > FEW_ROWS and (missing := -len(ids) % ROWS):
            # Pad with separate sequences whose output is unused, so no other row changes. One longer sequence would
            # exceed the rotary tables, and its NaN would spread into the sums over all rows.
            groups += [(min(missing - row, self.max_length), [0]) for row in range(0, missing, self.max_length)]
            ids += [0] * missing
        attention = packed(groups, self.device, weights.fused)
        rows = upload(torch.tensor(batch.rows), self.device)
        if routes.scores is not None:
            routes.scores.rows = rows
        routes = routes.filled_up(count, len(ids))
        return self.decoder(upload(torch.tensor(ids), self.device), attention, weights, rows, routes)

    @torch.no_grad()
    def frozen_logprobs(
        self,
        weights: WeightSet,
        prompts: list[list[int]],
        responses: list[list[int]],
        truncation: Truncation,
        chunk: int,
        routes: Routes = NO_ROUTES,
        written: list[list[bool]] | None = None,
    ) -> Tensor:
        """Return `logprobs` with a given weight set, such as `shadow` or `reference`: (T,), without gradient."""
        how = truncation, chunk, None, routes, weights, written
        return self.logprobs(prompts, responses, *how)[0]
