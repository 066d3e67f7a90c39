"""The cases of tools/same_bits.py: overrides of a tiny configuration."""

from pathlib import Path
from typing import NamedTuple

CUSTOM = Path(__file__).resolve().parents[1] / "examples" / "custom_objective.py"


class Case(NamedTuple):
    """One case: a model, overrides of `tiny_settings`, and what to run beside `qarl train`."""

    overrides: str = ""
    model: str = "llama"  # the family, and a number of layers if not 2: "qwen3 1"; or the YAML file of a checkout
    quick: bool = False
    ranks: int = 1
    resume: bool = False  # run one step first, then the same command again for all steps
    export: bool = False
    interpreted: bool = False  # Triton kernels, in the interpreter


NO_GROUPS = "quant.group_size=null"
SCHEMES = {
    "bf16": f"quant.scheme=bf16 {NO_GROUPS}",
    "w4a16": "",
    "w4a16_asymmetric": "quant.symmetric=false",
    "w4a16_symmetric7": "quant.grid=symmetric7",
    "w4a16_g64": "quant.group_size=64",
    "w4a16_channel": "quant.group_size=-1",
    "w4a16_float32_scales": "quant.scale_dtype=float32",
    "w4a8": "quant.scheme=w4a8",
    "w8a8": f"quant.scheme=w8a8 {NO_GROUPS}",
    "fp8": f"quant.scheme=fp8 {NO_GROUPS}",
    "fp8_block": f"quant.scheme=fp8_block {NO_GROUPS}",
    "nvfp4a16": f"quant.scheme=nvfp4a16 {NO_GROUPS}",
}
OBJECTIVES = ("tbpo", "grpo", "dapo", "dual_clip_grpo", "gspo", "mis_gspo", "sapo", "positive_only", "reinforce")
FAMILIES = ("mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
KERNELS = ("bf16", "w4a16", "w4a16_asymmetric", "w4a8", "w8a8", "fp8", "fp8_block", "nvfp4a16")
QUICK = {"bf16", "w4a16", "fp8", "tbpo", "gspo", "reinforce", "qwen3_moe"}
MISMATCH = "quant.learner=full_precision"  # so that no ratio is 1
QUICKSTART = "train.steps=2 train.prompts_per_step=4 objective.advantage=reinforce evaluation.samples=1"
SMALL = "train.prompts_per_step=1 train.minibatch_size=4 train.steps=1 objective.name=reinforce train.seed=1"
VLLM = "rollout.engine=vllm rollout.max_num_seqs=4 rollout.kv_cache_tokens=4096"
FAST = "rollout.numerics=fast rollout.linear_kernels=vllm"
DEEPSPEED = "distributed.engine=deepspeed"
EVERY = " ".join(f"diagnostics.{key}_every=1" for key in ("shadow", "deployed", "crossings", "gradients"))

CASES: dict[str, Case] = {
    **{f"scheme/{name}": Case(text, quick=name in QUICK, export=True) for name, text in SCHEMES.items()},
    **{f"objective/{name}": Case(f"{MISMATCH} objective.name={name}", quick=name in QUICK) for name in OBJECTIVES},
    "objective/rloo": Case(f"{MISMATCH} objective.name=rloo"),
    "objective/on_policy": Case(f"{MISMATCH} objective.name=on_policy train.minibatch_size=16"),
    "objective/custom": Case(f"{MISMATCH} objective.name=custom objective.path={CUSTOM}:cispo"),
    **{f"family/{name}": Case(model=name, quick=name in QUICK, export=True) for name in FAMILIES},
    "correction/tis": Case(f"{MISMATCH} correction.preset=tis"),
    "correction/icepop": Case(f"{MISMATCH} correction.preset=icepop"),
    "correction/bypass_k3_rs": Case(f"{MISMATCH} correction.preset=bypass_k3_rs"),
    "learner/fake_quant": Case("quant.learner=fake_quant"),
    "learner/full_precision": Case("quant.learner=full_precision"),
    "learner/dequantized_input": Case(f"quant.scheme=w8a8 {NO_GROUPS} quant.ste_input=dequantized"),
    "learner/float32": Case("model.learner_dtype=float32 quant.learner=full_precision"),
    "dtype/float16": Case("model.dtype=float16"),
    "dtype/float32": Case("model.dtype=float32", "qwen3"),
    "quant/ignore": Case("quant.ignore=[lm_head,model.layers.0.mlp.down_proj]", "qwen2", export=True),
    "optim/muon": Case("optim.name=muon"),
    "optim/bfloat16_masters": Case("optim.master_dtype=bfloat16 optim.schedule=cosine optim.warmup_steps=1"),
    "kv_cache/fp8": Case("quant.kv_cache_dtype=fp8"),
    "rollout/truncated": Case(
        "rollout.top_k=40 rollout.top_p=0.9 rollout.temperature=0.8 objective.truncation_set=replay"
    ),
    "rollout/pruned": Case("objective.name=tbpo objective.dvp_rho=0.001 rollout.kv_cache_tokens=256"),
    "objective/regularized": Case(
        "objective.kl_coef=0.1 objective.entropy_coef=0.01 train.recompute=layer train.epochs=2"
    ),
    "moe/replay": Case(
        "model.routing=replay objective.router_aux_coef=0.1 objective.router_z_coef=0.01", "olmoe", quick=True
    ),
    "moe/fp8": Case(f"quant.scheme=fp8 {NO_GROUPS}", "mixtral", export=True),
    "moe/w4a8": Case("quant.scheme=w4a8", "qwen2_moe"),
    "diagnostics": Case(f"{EVERY} {MISMATCH}"),
    "diagnostics/moe": Case(EVERY, "qwen3_moe"),
    "resume": Case("optim.schedule=linear train.steps=2", resume=True, quick=True),
    "resume/muon_moe": Case("optim.name=muon", "qwen3_moe", resume=True),
    "ranks/rows": Case("", "qwen3", ranks=2, export=True),
    "ranks/rows_moe_muon": Case("optim.name=muon", "qwen3_moe", ranks=2),
    "ranks/rows_fp8_resume": Case(f"quant.scheme=fp8 {NO_GROUPS}", ranks=2, resume=True),
    "ranks/deepspeed_0": Case(f"{DEEPSPEED} distributed.zero_stage=0", ranks=2),
    "ranks/deepspeed_3": Case(f"{DEEPSPEED} distributed.zero_stage=3", "qwen3", ranks=2),
    "kernels/w4a16_quick": Case(SMALL, "qwen3 1", True, interpreted=True),
    **{f"kernels/{name}": Case(f"{SMALL} {SCHEMES[name]}", "llama 1", interpreted=True) for name in KERNELS},
    "kernels/moe_w4a16": Case(SMALL, "olmoe 1", interpreted=True),
    "kernels/moe_fp8": Case(f"{SMALL} {SCHEMES['fp8']}", "qwen2_moe 1", interpreted=True),
    "kernels/kv_cache_fp8": Case(f"{SMALL} quant.kv_cache_dtype=fp8", "qwen2 1", interpreted=True),
    "quickstart": Case(QUICKSTART, "configs/quickstart.yaml"),
    "vllm/fast": Case(f"{VLLM} {FAST}", "qwen3"),
    "vllm/fast_delta": Case(f"{VLLM} {FAST} rollout.vllm.process=inline rollout.vllm.publish=delta", "qwen3"),
    "vllm/exact": Case(f"{VLLM} rollout.numerics=exact rollout.vllm.process=inline", "qwen3"),
}
