"""The whole configuration, and the constraints between its sections."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from qarl.config.by_device import ON_CPU
from qarl.config.checkpoint import CheckpointConfig
from qarl.config.data import DataConfig
from qarl.config.diagnostics import COSTLY, DiagnosticsConfig
from qarl.config.distributed import DistributedConfig
from qarl.config.evaluation import EvaluationConfig
from qarl.config.logging import LoggingConfig
from qarl.config.model import ModelConfig
from qarl.config.objective import GROUP_ADVANTAGES, AnyObjective, objective_faults, resolved_objective
from qarl.config.optim import DYNAMIC_LOSS_SCALE, OptimConfig
from qarl.config.quant import QuantConfig, scheme_of
from qarl.config.reward import RewardConfig, shadowed_column_faults
from qarl.config.rollout import AsyncConfig, RolloutConfig
from qarl.config.train import TrainConfig
from qarl.config.yaml_io import dump_yaml
from qarl.inputs.limits import KV_PAGE, POOL_TOKENS, RESPONSES, STEP_TOKENS, VLLM_TEMPERATURES
from qarl.inputs.section import Fault, Field, Section, notice
from qarl.objectives.correction_config import CorrectionConfig
from qarl.objectives.tbpo import TBPO


class Config(Section):
    """A training run.

    Validation fills in defaults that depend on one section, and objective.ratio and dvp_outside, which depend on the
    correction. Other values that depend on several sections are properties.
    """

    model: ModelConfig = Field(description="The model to train.")
    quant: QuantConfig = Field(default_factory=QuantConfig, description="Quantization scheme and regime.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig, description="Sampling.")
    data: DataConfig = Field(description="Prompts.")
    reward: RewardConfig = Field(default_factory=RewardConfig, description="Reward functions.")
    objective: AnyObjective = Field(
        default_factory=TBPO,
        description="Training objective, selected by name; a string is the path of a custom one, file.py:name.",
    )
    correction: CorrectionConfig = Field(
        default_factory=CorrectionConfig, description="Importance correction of the sampler-learner mismatch."
    )
    optim: OptimConfig = Field(default_factory=OptimConfig, description="Optimizer and schedule.")
    train: TrainConfig = Field(description="The training loop.")
    distributed: DistributedConfig = Field(default_factory=DistributedConfig, description="Training on several GPUs.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Checkpoints and resuming.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Evaluation tasks and schedule.")
    diagnostics: DiagnosticsConfig = Field(
        default_factory=DiagnosticsConfig,
        description="Costly measurements of precision and mismatch. Intervals (`_every`) are training steps; 0: off.",
    )
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="Console output and metric recorders.")

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, data: Any) -> Any:
        """Treat an empty section (`quant:` with nothing below it) as its defaults."""
        if not isinstance(data, dict):
            return data
        return {key: {} if value is None and key in cls.model_fields else value for key, value in data.items()}

    @model_validator(mode="before")
    @classmethod
    def _supervised_defaults(cls, data: Any) -> Any:
        """Fill in the rollout defaults of objectives without rewards: one response per prompt, for sft a given one."""
        objective = data.get("objective") if isinstance(data, dict) else None
        name = objective.get("name") if isinstance(objective, dict) else None
        defaults: dict[str, dict[str, Any]] = {"sft": {"n": 1, "engine": "data"}, "distill": {"n": 1}}
        if not isinstance(name, str) or name not in defaults:
            return data
        rollout = data.get("rollout") or {}
        return {**data, "rollout": defaults[name] | rollout} if isinstance(rollout, dict) else data

    @property
    def run_dir(self) -> Path:
        """Output directory of the run. `load_config` sets train.run_dir; the fallback is runs/unnamed."""
        return Path(self.train.run_dir or "runs/unnamed").expanduser()

    @property
    def responses_per_step(self) -> int:
        """Responses sampled per training step."""
        return self.train.prompts_per_step * self.rollout.n

    @property
    def minibatch_size(self) -> int:
        """Responses per optimizer step; divides `responses_per_step`."""
        return self.train.minibatch_size or self.responses_per_step

    @property
    def min_p(self) -> float:
        """Drop tokens less probable than this fraction of the most probable, in sampler and learner; 0 is off."""
        return self.objective.dvp_rho or self.rollout.min_p

    @property
    def truncated(self) -> bool:
        """Whether sampling is truncated, so that a sampled token may be outside the learner's set."""
        return self.min_p > 0 or self.ranked

    @property
    def ranked(self) -> bool:
        """Whether the sampler truncates by rank (top-p or top-k)."""
        return self.rollout.top_p < 1 or self.rollout.top_k > 0

    @property
    def learner_dtype(self) -> str:
        """Compute dtype of the learner's forward."""
        return self.model.learner_dtype or self.model.dtype

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        chosen = self.optim.dynamic_loss_scale
        return self.learner_dtype == "float16" and self.optim.loss_scale is None if chosen is None else chosen

    @property
    def loss_scale(self) -> float:
        """Initial loss scale. It keeps the gradients of a float16 learner from underflowing."""
        return self.optim.loss_scale or (DYNAMIC_LOSS_SCALE if self.dynamic_loss_scale else 1.0)

    @property
    def diagnostic_loss_scale(self) -> float:
        """Loss scale of diagnostic backwards. It cancels out of their results, so float16 needs only a moderate one."""
        return 1024.0 if self.dynamic_loss_scale else self.loss_scale

    def experts_unserved(self, device: str) -> str:
        """Why vLLM's own expert kernels do not work on a device ("cpu", "cuda", "auto"); empty if they do."""
        if device == "cpu":
            return "vLLM's CPU build keeps using a model's first experts after new weights are published"
        if device != "auto" and self.quant.scheme == "w4a8":
            return "vLLM does not support experts with int4 weights and int8 activations on a GPU"
        return ""

    @property
    def records_routing(self) -> bool:
        """Whether any step records which experts the sampler routes its tokens to."""
        return self.model.routing == "replay" or self.diagnostics.routing_every > 0

    def records_routing_at(self, step: int) -> bool:
        """Whether training step `step` (counted from 1) records the sampler's routing."""
        return self.model.routing == "replay" or "routing" in self.diagnostics.due(step)

    @property
    def given(self) -> bool:
        """Whether the responses come from the data, so that nothing is sampled."""
        return self.rollout.engine == "data"

    @property
    def learns_stale(self) -> bool | None:
        """Whether `logp_old` of a token is computed at the policy version that sampled it, which may be an earlier one.

        False: all tokens of a step have the current version. None: tokens may have earlier versions, but `logp_old` is
        computed at the current one.
        """
        ahead = self.rollout.asynchronous
        if ahead is None:
            return False
        return True if ahead.proximal == "sampled" else None

    @property
    def max_sequence_length(self) -> int:
        """Maximum tokens of a prompt plus its response."""
        return self.data.max_prompt_length + self.rollout.max_response_length

    @property
    def sequences(self) -> int:
        """Maximum sequences decoded together. rollout.max_num_seqs: null counts as the CPU default, the lowest one."""
        ahead = self.rollout.asynchronous
        steps, prompts = 1, self.train.prompts_per_step
        if ahead is not None:
            steps = ahead.steps_ahead + 1  # responses of this many steps are sampled at the same time
            prompts = math.ceil(prompts * ahead.oversample)
        return min(self.rollout.max_num_seqs or ON_CPU["rollout.max_num_seqs"], steps * prompts * self.rollout.n)

    @property
    def kv_cache_tokens(self) -> int:
        """Capacity of the KV cache in tokens, at least one full sequence."""
        return self.rollout.kv_cache_tokens or self.sequences * self.max_sequence_length

    @property
    def eval_response_length(self) -> int:
        """Maximum response length of evaluations in tokens."""
        return self.evaluation.max_response_length or self.rollout.max_response_length

    def to_yaml(self) -> str:
        """Write every key and its value as YAML. `load_config` of the result gives an equal Config."""
        return dump_yaml(self.model_dump())

    def faults(self) -> Iterator[Fault]:
        yield from objective_faults(self)
        yield from self._reward_faults()
        for fault in shadowed_column_faults(self.data.columns, self.reward.functions):
            yield Fault(("data", "columns", *fault.key), fault.value, fault.text)
        if self.quant.learner == "aligned" and self.learner_dtype != self.model.dtype:
            yield self.fault(
                "model.learner_dtype",
                f"an aligned learner computes as the sampler does, in model.dtype = {self.model.dtype}; leave null, or "
                "use quant.learner: full_precision or fake_quant",
            )
        yield from self._fp8_faults()
        if self.quant.init != "rtn" and self.optim.master_dtype != "float32":
            text = f"masters rounded to optim.master_dtype {self.optim.master_dtype} quantize to other codes; use rtn"
            yield self.fault("quant.init", text)
        if self.diagnostics.reference_every and self.objective.kl_coef:
            text = "objective.kl_coef measures policy/kl_ref in every step; must be 0"
            yield self.fault("diagnostics.reference_every", text)
        if self.optim.offload and self.model.device == "cpu":
            yield self.fault("optim.offload", "model.device is cpu: there is no device to offload from; must be false")
        if self.rollout.n == 1 and self.objective.advantage in GROUP_ADVANTAGES:
            yield self.fault(
                "rollout.n",
                f"advantage {self.objective.advantage} compares responses of one prompt; must be 2 or more, "
                "or use objective.advantage: reinforce",
            )
        if self.rollout.dynamic_sampling is not None and self.objective.advantage not in GROUP_ADVANTAGES:
            text = f"objective.advantage {self.objective.advantage} trains on groups of equal rewards too; must be null"
            yield self.fault("rollout.dynamic_sampling", text)
        if self.responses_per_step % self.minibatch_size:
            yield Fault(
                ("train", "minibatch_size"),
                self.minibatch_size,
                f"must divide train.prompts_per_step * rollout.n = {self.responses_per_step}; "
                f"nearest: {_nearest_divisor(self.responses_per_step, self.minibatch_size)}",
            )
        yield from self._size_faults()
        lengths = (
            f"data.max_prompt_length + rollout.max_response_length = {self.data.max_prompt_length} + "
            f"{self.rollout.max_response_length} = {self.max_sequence_length}"
        )
        if self.model.max_length is not None and self.max_sequence_length > self.model.max_length:
            yield self.fault("model.max_length", f"must hold {lengths}")
        pool = self.rollout.kv_cache_tokens
        if pool is not None and pool < self.max_sequence_length:
            yield self.fault("rollout.kv_cache_tokens", f"must hold one full sequence: {lengths} or more")
        elif pool is not None and self.rollout.engine == "native":
            need = -(-self.max_sequence_length // KV_PAGE) * KV_PAGE  # a partial page at the end cannot be used
            if pool < need:
                text = f"its whole pages of {KV_PAGE} tokens must hold one full sequence: {lengths}"
                yield self.fault("rollout.kv_cache_tokens", f"{text}; must be {need} or more")
        if self.rollout.engine == "vllm":
            yield from self._vllm_faults()
        if self.rollout.asynchronous is not None:
            yield from self._async_faults(self.rollout.asynchronous)

    def _reward_faults(self) -> Iterator[Fault]:
        """Rewards that an objective needs and lacks, and settings that given responses rule out."""
        objective, functions = self.objective, self.reward.functions
        if objective.rewarded and not functions:
            text = f"{objective.name} learns from rewards; name a function, or use objective.name: sft or distill"
            yield self.fault("reward.functions", text)
        if self.rollout.engine != "data":
            if self.data.response is not None:
                yield self.fault("data.response", "responses are sampled; leave null, or use rollout.engine: data")
            if self.diagnostics.gradients_every and not objective.rewarded:
                text = f"{objective.name} has no policy gradient to measure; must be 0"
                yield self.fault("diagnostics.gradients_every", text)
            return
        if objective.rewarded:
            text = f"{objective.name} learns from sampled responses; use objective.name: sft or distill"
            yield self.fault("rollout.engine", text)
        elif functions:
            text = f"{objective.name} with given responses has no rewards; leave the section out"
            yield Fault(("reward", "functions"), [function.name for function in functions], text)
        for key in (f"{name}_every" for name in COSTLY if name != "crossings"):
            if getattr(self.diagnostics, key):
                yield self.fault(f"diagnostics.{key}", "needs responses with advantages; must be 0 for given ones")
        if self.model.routing != "own":
            yield self.fault("model.routing", "there is no sampler whose routing could be replayed; must be own")

    def _async_faults(self, ahead: AsyncConfig) -> Iterator[Fault]:
        """Settings that cannot be combined with asynchronous rollouts."""
        if self.model.device == "cpu" and ahead.device is not None:
            yield self.fault("rollout.async.device", "model.device is cpu; leave null")
        native = self.rollout.engine == "native"
        if native and self.model.device == "cuda" and (reason := self.inexact_on_gpu):
            yield self.fault("rollout.async", reason.removesuffix(", or use numerics fast"))
        old_masters = self.quant.learner == "full_precision" or self.learner_dtype != self.model.dtype
        if ahead.proximal == "sampled" and old_masters:
            text = "the learner's earlier weights are not kept, only the codes; use newest, or quant.learner: aligned"
            yield self.fault("rollout.async.proximal", text)
        if ahead.verify_frac < 1:
            yield from self._unverified_faults()
        if not native:
            yield from self._vllm_routing_faults()
        if ahead.in_flight == "wait":
            return
        text = f"rollout.async.in_flight: {ahead.in_flight} mixes policy versions in a response; use wait"
        if self.objective.truncation_set == "replay":
            yield self.fault("objective.truncation_set", text)
        if self.model.routing != "own":
            yield self.fault("model.routing", text)
        if self.diagnostics.routing_every:
            yield self.fault("diagnostics.routing_every", text)
        if self.objective.router_floor is not None:
            yield self.fault("objective.router_shift_floor", text)

    def _vllm_routing_faults(self) -> Iterator[Fault]:
        """Settings that need the sampler's routing. vLLM's is recorded per call, but asynchronous requests overlap."""
        text = "rollout.async with engine vllm does not record experts; must be {}, or use rollout.engine: native"
        if self.model.routing == "replay":
            yield self.fault("model.routing", text.format("own or replay_learner"))
        if self.diagnostics.routing_every:
            yield self.fault("diagnostics.routing_every", text.format(0))

    def _unverified_faults(self) -> Iterator[Fault]:
        """Settings that require a learner forward at the policy version of every response."""
        key = "rollout.async.verify_frac"
        if self.rollout.engine == "vllm" and self.vllm_numerics == "fast":
            yield self.fault(key, "the log-probs of vLLM's own kernels are not the learner's; must be 1")
        if self.quant.learner != "aligned":
            yield self.fault(key, f"a {self.quant.learner} learner's log-probs are not the sampler's; must be 1")
        if self.objective.truncation_set == "replay":
            yield self.fault(key, "objective.truncation_set: replay records the learner's sets; must be 1")
        if self.model.routing == "replay_learner":
            yield self.fault(key, "model.routing: replay_learner records the learner's experts; must be 1")
        if self.objective.router_floor is not None:
            yield self.fault(key, "objective.router_shift_floor needs the router at that version; must be 1")

    def _fp8_faults(self) -> Iterator[Fault]:
        """FP8 backward requested for a learner whose layers run in plain torch."""
        if self.quant.kernels == "reference":
            plain = "quant.kernels: reference"
        elif self.model.device == "cpu":
            plain = "model.device: cpu"
        elif "float32" in (self.model.dtype, self.learner_dtype):
            plain = f"{'model.dtype' if self.model.dtype == 'float32' else 'model.learner_dtype'}: float32"
        else:
            return
        yield from self._without_fp8(plain)

    def faults_without_gpu(self) -> Iterator[Fault]:
        """Settings of a configuration with device `auto` that cannot train on a machine without a GPU."""
        yield from self._without_fp8("a machine without a GPU")

    def _without_fp8(self, plain: str) -> Iterator[Fault]:
        text = f"{plain} has no Triton kernels and no FP8 matrix products"
        if self.quant.backward == "fp8":
            yield self.fault("quant.backward", f"{text}; use bf16")
        if self.diagnostics.backward_every:
            yield self.fault("diagnostics.backward_every", f"{text}; must be 0")

    def _size_faults(self) -> Iterator[Fault]:
        """Products of sizes that exceed a limit although each size is valid."""
        responses, longest = self.responses_per_step, self.max_sequence_length
        if responses > RESPONSES:
            text = f"times train.prompts_per_step = {self.train.prompts_per_step} is {responses:,} responses per step"
            yield self.fault("rollout.n", f"{text}; at most {RESPONSES:,} are possible")
        elif responses * longest > STEP_TOKENS:
            text = f"{responses:,} responses per step have {responses * longest:,} tokens with their prompts"
            yield self.fault("rollout.max_response_length", f"{text}; at most {STEP_TOKENS:,} are possible")
        elif self.kv_cache_tokens > POOL_TOKENS:
            text = f"sequences of {longest:,} tokens need a KV pool of {self.kv_cache_tokens:,}"
            fix = f"at most {POOL_TOKENS:,} are possible; lower it, or set rollout.kv_cache_tokens"
            yield self.fault("rollout.max_num_seqs", f"{text}; {fix}")

    def resolved(self) -> dict[str, Any]:
        return {"objective": resolved_objective(self), "rollout": self._resolved_rollout()}

    def _resolved_rollout(self) -> RolloutConfig:
        """Resolve `rollout.numerics`: exact, unless another setting rules it out."""
        rollout = self.rollout
        if rollout.engine != "vllm" or rollout.numerics == self.vllm_numerics:
            return rollout
        if rollout.numerics == "fast":
            notice("rollout.linear_kernels: qarl selects numerics exact, which uses the same kernels for linear layers")
        decided = rollout.model_copy()
        decided.__dict__["numerics"] = self.vllm_numerics  # leaves model_fields_set unchanged: see `keep_sizes`
        if self.vllm_numerics == "fast":
            notice(
                f"rollout.numerics: fast, because {self._inexact} rules out exact; vLLM's log-probs will differ from "
                "the learner's"
            )
        return decided

    @property
    def vllm_numerics(self) -> Literal["exact", "fast"]:
        """`rollout.numerics`, or its default with engine vllm."""
        if self.rollout.linear_kernels == "qarl":
            return "exact"
        return self.rollout.numerics or ("fast" if self._inexact else "exact")

    @property
    def _inexact(self) -> str:
        """Which key rules out exact numerics; "" if none does. Device auto may be a GPU."""
        if self.rollout.inexact or self.model.device == "cpu":
            return self.rollout.inexact
        if self.model.dtype == "float32":
            return "model.dtype: float32 on a GPU"
        return "quant.kernels: reference" if self.quant.kernels == "reference" else ""

    def _vllm_faults(self) -> Iterator[Fault]:
        """Schemes and dtypes that vLLM (compressed-tensors, linear kernels) does not support (0.24 to 0.32)."""
        model, quant, vllm = self.model, self.quant, self.rollout.vllm
        if model.device == "cpu" and vllm.device is not None:
            yield self.fault("rollout.vllm.device", "model.device is cpu, and so is vLLM's; leave null")
        fast = self.vllm_numerics == "fast"
        if model.device == "cpu" and fast and not scheme_of(quant).vllm_cpu:
            text = f"vLLM has no {quant.scheme} on a CPU; use rollout.numerics: exact"
            yield Fault(("rollout", "numerics"), "fast", text)
        if not fast and model.device == "cuda" and (reason := self.inexact_on_gpu):
            yield Fault(("rollout", "numerics"), "exact", reason)
        coldest, hottest = VLLM_TEMPERATURES
        for section in ("rollout", "evaluation"):
            temperature = getattr(self, section).temperature
            if fast and temperature != 0 and not coldest <= temperature <= hottest:
                text = (
                    f"vLLM samples at {coldest:g} to {hottest:g}; must be in this range, or use rollout.numerics: exact"
                )
                yield self.fault(f"{section}.temperature", text)
        # Tested on a CPU: float32 works unquantized and with w8a8 and fp8. The int4 product and all GPU products
        # require 16-bit activations.
        if model.dtype == "float32" and quant.scheme != "bf16":
            valid = "use bfloat16 or float16"
            if model.device == "cuda":
                yield self.fault("model.dtype", f"vLLM has no float32 {quant.scheme} on a GPU; {valid}")
            elif scheme_of(quant).packed and fast:
                yield self.fault(
                    "model.dtype", f"vLLM has no float32 {quant.scheme}; {valid}, or on the CPU rollout.numerics: exact"
                )
        if scheme_of(quant).packed and scheme_of(quant).scale_dtypes and quant.scale_dtype != model.dtype:
            yield self.fault(
                "quant.scale_dtype", f"vLLM stores the scales of int4 weights in model.dtype; must be {model.dtype}"
            )

    @property
    def inexact_on_gpu(self) -> str | None:
        """Why a GPU cannot run `rollout.numerics: exact`, and the fix; None if it can."""
        fix = "or use numerics fast"
        if self.model.dtype == "float32":
            return f"there are no batch-invariant float32 kernels for GPUs; use bfloat16, {fix}"
        if self.quant.kernels == "reference":
            return f"quant.kernels: reference is not batch-invariant on a GPU; leave it out, {fix}"
        return None


def mixture_faults(config: Config) -> Iterator[Fault]:
    """Report settings for mixtures of experts if the model is dense."""
    text = "the model has no experts"
    if config.model.routing != "own":
        yield config.fault("model.routing", f"{text}; must be own")
    for key in ("router_aux_coef", "router_z_coef"):
        if getattr(config.objective, key):
            yield config.fault(f"objective.{key}", f"{text}; must be 0")
    if config.objective.router_floor is not None:
        yield config.fault("objective.router_shift_floor", f"{text}; must be null")
    if config.diagnostics.routing_every:
        yield config.fault("diagnostics.routing_every", f"{text}; must be 0")


def _nearest_divisor(total: int, wanted: int) -> int:
    """The divisor of `total` nearest to `wanted`; the smaller one in a tie. Takes O(sqrt(total)) time."""
    low = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    return min((*low, *(total // d for d in low)), key=lambda d: (abs(d - wanted), d))
