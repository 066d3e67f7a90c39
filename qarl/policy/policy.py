"""The policy: masters, the snapshot made from them, and the forwards of learner, sampler, shadow and reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from qarl_formats.scheme import Scheme, is_ignored
from qarl_kernels.attention import PAGE
from qarl_kernels.logprob import Truncation, logits_of, token_logprobs
from torch import Tensor, nn
from transformers import PreTrainedModel

from qarl.config import QuantConfig
from qarl.config.architecture import unserved_heads
from qarl.errors import UserError
from qarl.fused import shared_scales
from qarl.policy.attention import packed
from qarl.policy.decoder import Decoder, Recompute
from qarl.policy.experts import move_experts
from qarl.policy.kernels import use_kernels
from qarl.policy.linear import QuantLinear
from qarl.policy.modules import HFModule, check_family, replace_modules
from qarl.policy.packing import pack
from qarl.policy.projection import InPlace
from qarl.policy.routes import NO_ROUTES, ExpertLayer, Routes
from qarl.policy.sampler import Sampler
from qarl.policy.skeleton import check_shapes, linear_names
from qarl.policy.view import Role, View
from qarl.policy.views import ViewMaker, restack
from qarl.transfer import upload
from qarl.weight_sync.layout import ModelLayout
from qarl.weight_sync.snapshot import Snapshot, quantize_parameters

# A packed batch on a GPU is filled up to a multiple of so many rows, where it has more than a few: weight gradients sum
# over rows, and libraries have their fast products for whole tiles of them; and sizes of memory come up again.
ROWS, FEW_ROWS = 256, 4096


class Policy:
    """A Hugging Face causal LM rebuilt on qarl's layers.

    masters: `named_parameters()`, float32. current: the `Snapshot` of the masters at `version`; `refresh` makes a
    new one after an optimizer step, and the learner's forward reads it. sampler: what rollout engines get; its
    `install` points the sampler's forward at a published snapshot.
    Given a snapshot from the start, `model` may be a `skeleton` whose masters hold no values: for inference alone, or
    for a learner whose masters somebody else holds and who calls `take` with what they quantize to. values: see there.
    Raises UserError for models and schemes that cannot run exactly.

    dtype: of what is published and of the sampler's forward. learner_dtype: of the learner's, where it is another one;
    it then reads the masters, rounded to it. learner_view: what its forward reads.
    aligned: the learner's forward is the sampler's; at the same version they read one view and give the same bits.
    """

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
        if quant.learner == "aligned" and self.learner_dtype != dtype:
            raise UserError(
                f"model.learner_dtype: an aligned learner computes in the sampler's {dtype}; leave null, "
                "or use quant.learner: full_precision"
            )
        self.aligned = quant.learner == "aligned"
        self.kernels = use_kernels(quant, scheme, dtype, device)
        limit = model.config.max_position_embeddings
        if max_length is not None and max_length > limit:
            raise UserError(f"model.max_length: {max_length} is above the model's {limit} positions; lower it")
        self.max_length = max_length or limit
        self.role = Role()
        self.config = model.config
        self.model = model
        head = model.get_output_embeddings()
        if head.bias is not None:
            raise UserError("model.path: an output layer with a bias is not supported")
        if not is_ignored("lm_head", quant.ignore):
            raise UserError(f"quant.ignore: {quant.ignore} must keep 'lm_head': the output layer is never quantized")
        self.tied = head.weight is model.get_input_embeddings().weight
        self.head_master: nn.Parameter = head.weight
        self.linears = self._replace_linears()
        replace_modules(model, self.role, -(-self.max_length // PAGE) * PAGE, {dtype, self.learner_dtype}, device)
        if snapshot is None:
            move_experts(model, device)
            self.model = model.to(device)  # type: ignore[arg-type]  # its decorator hides what it takes
        self.decoder = Decoder(self.model.base_model, self.role, quant.ste_input == "dequantized", quant.backward)
        if self.kernels and (reason := unserved_heads(self.decoder.layers[0].head_dim)):
            raise UserError(f"model.path: the model {reason}")
        masters = dict(self.named_parameters())
        head_name = next(name for name, parameter in masters.items() if parameter is self.head_master)
        self._stacks = [stack for layer in self.decoder.layers for stack in layer.stacks]
        self._views = ViewMaker(masters, self._stacks, head_name, quant, dtype, self.learner_dtype, self.kernels)
        self._reference: View | None = None
        layout = ModelLayout(
            model.config,
            getattr(model, "generation_config", None),
            scheme,
            quant.ignore,
            dtype,
            device,
            self.max_length,
        )
        self.sampler = Sampler(layout, self.decoder, self.role, head_name, self.kernels)
        if snapshot is None:
            self.refresh(version=0)
        else:
            self.take(snapshot, values)
        self.sampler.install(self.current)

    def _replace_linears(self) -> dict[str, QuantLinear]:
        check_shapes(self.model, self.scheme, self.quant.ignore)
        linears = {}
        modules: dict[str, HFModule] = dict(self.model.named_modules())
        for name in linear_names(self.model):
            linear = QuantLinear(modules[name], name, self.role, self.quant.ste_input == "dequantized")
            parent, _, leaf = name.rpartition(".")
            setattr(modules[parent], leaf, linear)
            linears[name] = linear
        return linears

    @property
    def version(self) -> int:
        """Of the current parameters: optimizer steps taken."""
        return self.current.version

    @property
    def experts(self) -> list[ExpertLayer]:
        """Of the layers that have experts; none in a model that is no mixture."""
        return [layer.experts for layer in self.decoder.layers if layer.experts is not None]

    def at(self, version: int) -> bool:
        """Whether the current parameters are those of policy version `version`."""
        return self.version == version

    # --- masters and snapshots ---------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The float32 masters by Hugging Face name; tied weights once."""
        return self.model.named_parameters()

    def quantized(self, module: str) -> bool:
        return self.scheme.quantized and module in self.linears and not is_ignored(module, self.quant.ignore)

    @torch.no_grad()
    def refresh(self, version: int, values: Mapping[str, Tensor] | None = None) -> Snapshot:
        """Quantize the masters once, as policy `version`, and let the learner's forward read the result.

        values: of the masters by name, each asked for when it is needed, where the policy's own parameters hold none.
        Sampler and reference stay where they are. Raises UserError naming the tensor when a master is not finite.
        """
        masters = dict(self.named_parameters()) if values is None else values
        shared = shared_scales(filter(self.quantized, self.linears), self.scheme, masters.__getitem__)
        # Values that come one at a time would come twice to be seen under one another.
        stacks = [[f"{name}.weight" for name in stack.names] for stack in self._stacks] if values is None else []
        how = masters, self.scheme_of, self.dtype, version, self.kernels, shared, stacks
        self.take(quantize_parameters(*how), values)
        return self.current

    def take(self, snapshot: Snapshot, values: Mapping[str, Tensor] | None = None) -> None:
        """The snapshot is what the masters are now: the learner's forward reads it, and the sampler's may.

        values: of masters that hold none themselves, by name, in any dtype at least as fine as the learner's; None: the
        policy's own. An aligned learner reads none.
        """
        if self.kernels:
            restack(snapshot, self._stacks)
        self.current = snapshot
        self.learner_view = self._views.learner(snapshot, values)
        self._shadow: View | None = None  # made where somebody asks
        self.role.settle(self.learner_view)
        self.sampler.offer(snapshot, self._sampling_view)

    def scheme_of(self, name: str) -> Scheme | None:
        """What a parameter is quantized in; None: not at all."""
        return self.scheme if name.endswith(".weight") and self.quantized(name.removesuffix(".weight")) else None

    def _sampling_view(self) -> View:
        """The current snapshot in the sampler's arithmetic: what a shadow reads, and the sampler after a publish."""
        if self.aligned:
            return self.learner_view
        if self._shadow is None:
            self._shadow = self._views.sampling(self.current, self.learner_view)
        return self._shadow

    def keep_reference(self) -> None:
        """Keep the learner's parameters as they are now, for `reference_logprobs`; later versions change nothing."""
        self._reference = self.learner_view

    # --- forwards ----------------------------------------------------------------------------------------------

    def sampling(self) -> AbstractContextManager[None]:
        """Inside, forwards run as the sampler: on the published operands, without gradient."""
        return self.sampler.running()

    def shadow(self) -> AbstractContextManager[None]:
        """Inside, forwards run in the sampler's arithmetic at the current version, published or not.

        Where gradients are enabled they go straight through to the masters, as the learner's do. With gradient
        checkpointing the backward runs the forward again, so it belongs inside too.
        """
        return self.role.as_(self._sampling_view())

    def logprobs(
        self,
        prompts: list[list[int]],
        responses: list[list[int]],
        truncation: Truncation,
        chunk: int,
        retained: list[Tensor] | None = None,
        routes: Routes = NO_ROUTES,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of response tokens under the learner's forward, or inside `shadow` its, packed one after the other.

        prompts, responses: token ids, pairwise, each with at least one token. Neighbours with the same prompt share
        its forward; every row's bits are its own, so that changes nothing else. chunk: rows of logits held at once.
        Returns logp (T,) and the entropy (T,), float32, in nats, both with gradient to the masters. A token outside the
        truncated distribution has logp -inf and gives no gradient. retained: see `token_logprobs`. routes: of the rows
        as `qarl.policy.packing.pack` lays them out.
        """
        hidden = self._predicting(prompts, responses, routes)
        targets = upload(torch.tensor([t for r in responses for t in r]), self.device)
        view = self.role.view
        sums = InPlace() if view.fused else None
        return token_logprobs(
            hidden, self.head_master, view.head, targets, truncation, chunk, self.kernels, retained, sums
        )

    @torch.no_grad()
    def top_tokens(
        self, prompts: list[list[int]], responses: list[list[int]], chunk: int, routes: Routes = NO_ROUTES
    ) -> Tensor:
        """The likeliest token at the place of each response token, under the forward of `logprobs`: (T,) int64."""
        hidden, head = self._predicting(prompts, responses, routes), self.role.view.head
        parts = [
            logits_of(hidden[start : start + chunk], head, self.kernels).argmax(-1)
            for start in range(0, hidden.shape[0], chunk)
        ]
        return torch.cat(parts)

    def _predicting(self, prompts: list[list[int]], responses: list[list[int]], routes: Routes = NO_ROUTES) -> Tensor:
        """The final hidden state that each response token is predicted from: (T, H), as `logprobs` packs them."""
        batch = pack(prompts, responses)
        groups, ids, count = batch.groups, batch.ids, len(batch.ids)
        assert routes.replay is None or len(routes.replay) == count, f"{count} rows and a replay of other ones"
        fused = self.role.view.fused
        if fused and len(ids) > FEW_ROWS and (missing := -len(ids) % ROWS):
            # Sequences of their own that nobody reads: no other row's bits change. A longer one would have positions of
            # which there is no cosine, and a NaN there would be in the sums over all rows.
            groups += [(min(missing - row, self.max_length), [0]) for row in range(0, missing, self.max_length)]
            ids += [0] * missing
        attention = packed(groups, self.device, fused)
        rows = upload(torch.tensor(batch.rows), self.device)
        routes = routes.filled_up(count, len(ids))
        return self.decoder(upload(torch.tensor(ids), self.device), attention, rows, routes)

    @torch.no_grad()
    def shadow_logprobs(
        self,
        prompts: list[list[int]],
        responses: list[list[int]],
        truncation: Truncation,
        chunk: int,
        routes: Routes = NO_ROUTES,
    ) -> Tensor:
        """`logprobs` in the sampler's arithmetic at the current version (`shadow`): (T,), without gradient."""
        with self.shadow():
            return self.logprobs(prompts, responses, truncation, chunk, routes=routes)[0]

    @torch.no_grad()
    def reference_logprobs(
        self,
        prompts: list[list[int]],
        responses: list[list[int]],
        truncation: Truncation,
        chunk: int,
        routes: Routes = NO_ROUTES,
    ) -> Tensor:
        """`logprobs` of the version that `keep_reference` kept, as the learner ran it: (T,), without gradient."""
        assert self._reference is not None, "no reference was kept"
        with self.role.as_(self._reference):
            return self.logprobs(prompts, responses, truncation, chunk, routes=routes)[0]

    def set_recompute(self, recompute: Recompute) -> None:
        """What the backward computes again instead of keeping it, see `Decoder`."""
        self.decoder.recompute = recompute
