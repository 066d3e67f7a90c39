"""Each refusal is one line with the place, the key, the value and what is valid."""

import json

import pytest

from qarl.config import load_config
from qarl.config.yaml_io import parse_yaml
from qarl.errors import UserError
from qarl.inputs.section import notice
from qarl.memory.sizes import keep_sizes

VLLM = ["rollout.engine=vllm"]
EXACT = [*VLLM, "rollout.numerics=exact"]
AHEAD = "rollout.async={max_staleness: 1}"
GRPO = ["objective.name=grpo"]
FAST = [*VLLM, "rollout.numerics=fast"]

# Overrides, part of the text about what is valid, and the key and value unless they are those of the last override
REFUSALS = [
    # types, ranges, choices
    ("train.steps=ten", "must be an integer"),
    ("optim.lr=fast", "must be a number"),
    ("optim.lr=.nan", "must be a finite number"),
    ("data.shuffle=yes", "must be true or false"),
    ("model.path=3", "must be a string"),
    ("data.task={a: [1, {b: .nan}]}", "must be a finite number", "data.task.a.1.b = NaN"),
    ("quant=w4a16", "must be a mapping"),
    ("optim.betas=[0.9]", "must be a list of 2", "optim.betas"),
    ("quant.scheme=w4a15", "did you mean w4a16?"),
    ("quant.kernels=triton", "must be 'auto' or 'reference'"),
    ("quant.group_size=48", "32, 64, 128 or -1 (or null)"),
    ("rollout.stop=['']", "at least 1 character", 'rollout.stop.0 = ""'),
    ("reward.functions=[]", "learns from rewards; name a function"),
    # keys
    ("quant.group=64", "did you mean quant.group_size?"),
    ("train.lr=1", "did you mean optim.lr?"),
    ("checkpoint.zzz=1", "valid keys here: every, keep_last, resume, save_final"),
    (["logging.wandb.project=p", "logging.wandb.nmae=x"], "did you mean logging.wandb.name?"),
    ("reward.functions.0.wieght=1", "did you mean reward.functions.0.weight?"),
    ("train={}", "required, and not given. Number of training steps", "train.steps"),
    # model
    ("model.path=package:a.b", "must name an importable package"),
    (["model.path=package:x", "model.revision=main"], "leave null"),
    # quant
    (["quant.scheme=w8a8", "quant.group_size=64"], "use w4a16 or w4a8"),
    (["quant.scheme=w4a8", "quant.symmetric=false"], "must be true for w4a8"),
    (["quant.symmetric=false", "quant.grid=symmetric7"], "with asymmetric w4a16"),
    (["quant.scheme=bf16", "quant.learner=fake_quant"], "use aligned or full_precision"),
    ("quant.ste_input=dequantized", "use unquantized"),
    ("quant.ignore=[lm_head, 're:(']", "is not a regular expression", 'quant.ignore.1 = "re:("'),
    ("quant.ignore=[]", "must contain lm_head"),
    # data
    ("data.source=task:chess", "use task:arithmetic"),
    ("data.split=test", "a task generator has no splits"),
    (["data.source=a/b", "data.task={size: 3}"], "leave {} for a dataset"),
    (["data.chat_template=false", "data.system_prompt=hi"], "data.chat_template: true"),
    ("data.prompt_template='{prompt'", "not a str.format template"),
    ("data.prompt_template=hello", "must use a column"),
    # reward
    ("reward.functions.0.name=mth", "did you mean math?"),
    ("reward.functions.0.name=a/b.txt:f", "or file.py:function"),
    # objective
    ("objective.clip_ratio_low=0.1", "is read by grpo, dapo, dual_clip_grpo, gspo, mis_gspo, gmpo, rspo and positive"),
    (["objective.name=grpo", "objective.seq_clip_ratio_high=1e-4"], "grpo reads ratio, router_shift_floor, clip_ratio"),
    ("objective={name: rloo, ratio: one}", "not by rloo; leave null", 'objective.ratio = "one"'),
    (["objective={name: grpo, loss: no_clip}", "objective.clip_ratio_low=0.2"], "is not read with loss no_clip"),
    ("objective.path=mine.py:f", "is read by custom, not by tbpo; leave null, or set objective.name: custom"),
    ("objective={name: rloo, advantage: grpo}", "leave null, or use reinforce", 'objective.advantage = "grpo"'),
    (["objective.name=mis_gspo", "objective.mis_ratio_low=3.0"], "below objective.mis_ratio_high (2)"),
    ("objective.kl_estimator=k1", "set objective.kl_coef"),
    (["objective={name: distill, teacher: {path: t}}", "diagnostics.gradients_every=1"], "no policy gradient"),
    (["objective.dvp_rho=1e-6", "rollout.min_p=0.1"], "leave 0, or the same"),
    (["objective.name=on_policy", "train.epochs=2"], "must be 1"),
    (["objective.name=on_policy", "train.prompts_per_step=1", "rollout.n=4", "train.minibatch_size=2"], "null, or 4"),
    ("objective.name=grppo", "'on_policy', 'sft', 'distill' or 'custom'; did you mean grpo?"),
    ("objective=grpo", "as {name: grpo}, or file.py:name"),
    ("objective.name=custom", "required, and not given. path/to/file.py:name", "objective.path"),
    # correction
    ("correction.level=token", "must be none"),
    ("correction.preset=tis", "tbpo carries its own mismatch weight"),
    ([*GRPO, "correction={preset: icepop, upper: 0.4}"], "below correction.upper (0.4)", "correction.lower = 0.5"),
    ("correction.upper=3.0", "set level token, sequence or geometric"),
    ([*GRPO, "correction.level=token", "correction.signal=rollout"], "use corr, or reinforce, rloo or on_policy"),
    (["objective.name=gspo", "correction.preset=bypass_pg_is"], "is for a policy gradient without a ratio"),
    ([*GRPO, "correction={level: sequence, mode: raw}", "correction.upper=5.0"], "has no effect with mode raw"),
    ("objective.truncation_set=replay", "set rollout.top_p or rollout.top_k"),
    ("objective={name: gspo, truncation_set: replay, dvp_rho: 1e-6}", "use own", "objective.truncation_set"),
    ("objective.dvp_outside=token", "leave null, or set objective.dvp_rho"),
    ("correction.reject=[{estimator: k3, aggregate: sum}]", "is required for", "correction.reject.0.upper = null"),
    ("correction.reject=[{estimator: ratio, aggregate: sum}]", "set upper or lower", "reject.0.upper = null"),
    ("correction.reject=[{estimator: ratio, aggregate: sum, lower: 0, upper: 2}]", "greater than 0", "0.lower = 0"),
    (
        "correction.reject=[{estimator: k2, aggregate: sum, upper: 1}, {estimator: k2, aggregate: sum, upper: 2}]",
        "write one rule with both bounds",
        'correction.reject.1 = "sum k2 of corr outside [none, 2]"',
    ),
    ([*GRPO, "correction.preset=bypass", "correction.level=token"], "the ratio already contains the mismatch"),
    ([*GRPO, "objective.ratio=rollout", "correction.level=token"], "with objective.ratio rollout the ratio already"),
    ("correction.preset=bypass", "which tbpo does not read; use grpo, dapo"),
    (["objective.name=mis_gspo", "correction.preset=seq_tis"], "mis_ratio_high"),
    ("objective={name: mis_gspo, ratio: shadow}", "use train or one", 'objective.ratio = "shadow"'),
    ([*GRPO, "correction={level: token, cap: auto, upper: 3.0}"], "leave null", "correction.upper = 3"),
    # optim
    ("optim.momentum=0.9", "set optim.name: muon"),
    (["model.device=cpu", "optim.offload=all"], "no device to offload from"),
    ("optim.min_lr_ratio=0.1", "use linear or cosine, or 0"),
    # rollout, and vLLM in it
    ("rollout.linear_kernels=qarl", "use engine vllm"),
    ("rollout.kernels=native", "is called linear_kernels now; write linear_kernels: vllm"),
    ([*VLLM, "rollout.linear_kernels=native"], "is called vllm now"),
    ([*VLLM, "rollout.max_num_seqs=64", "rollout.max_batched_tokens=63"], "rollout.max_num_seqs = 64"),
    ("rollout.vllm={process: inline, device: 1}", "use separate, or leave null", "rollout.vllm.device = 1"),
    ("rollout.vllm.args.model=x", "set model.path"),
    ("rollout.vllm.args.logprobs_mode=raw_logits", "leave it out"),
    ("rollout.vllm.args.tensor_parallel_size=2", "set rollout.vllm.tensor_parallel"),
    ("rollout.vllm={tensor_parallel: 2, process: inline}", "use separate", 'rollout.vllm.process = "inline"'),
    ("rollout.vllm={tensor_parallel: 2, publish: delta}", "use full", 'rollout.vllm.publish = "delta"'),
    (["rollout.vllm.tensor_parallel=2", "rollout.vllm.args.async_scheduling=true"], "all GPUs must schedule the same"),
    ([*VLLM, AHEAD, "rollout.vllm.process=inline"], "use separate"),
    ([*VLLM, AHEAD, "rollout.vllm.device=1"], "rollout.async.device is the sampler's GPU"),
    ([*FAST, AHEAD, "rollout.vllm.tensor_parallel=2"], "must schedule the same; use 1"),
    ([*VLLM, AHEAD, "rollout.vllm.publish=delta"], "use full"),
    ([*VLLM, AHEAD, "model.routing=replay"], "or use rollout.engine: native"),
    ([*FAST, "rollout.async={verify_frac: 0.5}"], "vLLM's own kernels", "rollout.async.verify_frac = 0.5"),
    ([*EXACT, "rollout.vllm.tensor_parallel=2"], "computes in one product"),
    ("rollout.vllm.args={block-size: 16}", "write block_size", "args.block-size = 16"),
    ([*VLLM, "model.device=cpu", "rollout.vllm.device=0"], "leave null"),
    ([*VLLM, "quant.scale_dtype=float32"], "must be bfloat16"),
    ([*VLLM, "model.device=cuda", "quant.scheme=fp8", "model.dtype=float32"], "no float32 fp8 on a GPU"),
    ([*FAST, "rollout.temperature=0.005"], "vLLM samples at 0.01 to 2"),
    ([*FAST, "evaluation.temperature=0.005"], "or use rollout.numerics: exact"),
    ([*EXACT, "rollout.linear_kernels=vllm"], "qarl's kernels; leave null"),
    ([*EXACT, "rollout.vllm.args.block_size=32"], "or use numerics fast"),
    ([*VLLM, "rollout.vllm.args.kv_cache_dtype=fp8"], "quant.kv_cache_dtype"),
    ([*VLLM, "rollout.vllm.args.calculate_kv_scales=true"], "quant.kv_cache_dtype"),
    ([*EXACT, "rollout.vllm.args.speculative_config.method=ngram"], "numerics is exact", "args.speculative_config"),
    ([*EXACT, "model.device=cuda", "quant.kernels=reference"], "leave it out, or use", 'rollout.numerics = "exact"'),
    (["model.device=cuda", "model.dtype=float32", "quant.scheme=bf16", *EXACT], "use bfloat16, or use numerics fast"),
    # across sections
    ("rollout.n=1", "must be 2 or more, or use objective.advantage: reinforce"),
    ("train.minibatch_size=24", "prompts_per_step * rollout.n = 64; nearest: 16"),
    ("model.max_length=100", "512 + 256 = 768"),
    ("rollout.kv_cache_tokens=767", "512 + 256 = 768 or more"),
    ([AHEAD, "rollout.async.publish_every=3"], "must be at most max_staleness + 1, which is 2"),
    ("rollout.async={oversample: 1.5, order: finished}", "must be 1, or use prompts", "rollout.async.oversample = 1.5"),
]


@pytest.mark.parametrize("row", REFUSALS, ids=[str(row[0]) for row in REFUSALS])
def test_refused_on_one_line_with_place_value_and_what_is_valid(load, row):
    overrides, valid, *place = row
    overrides = [overrides] if isinstance(overrides, str) else overrides
    key, _, value = overrides[-1].partition("=")
    with pytest.raises(UserError) as caught:
        load(*overrides)
    (line,) = str(caught.value).splitlines()
    assert (place or [f"{key} = {json.dumps(parse_yaml(value, key))}"])[0] in line
    assert valid in line


ACCEPTED = [
    ["rollout.n=1", "objective.advantage=reinforce"],
    ["quant.scheme=bf16", "quant.learner=aligned"],
    ["quant.scheme=w8a8", "quant.ste_input=dequantized"],
    ["quant.symmetric=false"],
    ["quant.scheme=fp8", "quant.kernels=reference"],
    ["quant.scheme=w4a8", "quant.grid=symmetric7", "quant.group_size=-1"],
    ["objective.name=grpo", "correction={level: token, mode: mask, lower: 0.5, upper: 5}"],
    ["rollout.kv_cache_tokens=768"],
    ["model.max_length=768"],
    ["train.minibatch_size=16"],
    ["rollout.top_p=1.0", "rollout.min_p=0.99"],
    ["reward.functions.0.name=pkg.module:score"],
    ["data.prompt_template='{prompt} = {{?}}'"],
    [*VLLM, "rollout.linear_kernels=qarl", "rollout.vllm={device: 0, sleep_level: 2, publish: delta, timeout_s: 1.5}"],
    [*VLLM, "rollout.vllm.process=inline", "rollout.vllm.args={block_size: 16, tensor_parallel_size: 1, a: [{b: 1}]}"],
    [*VLLM, "model.device=cuda", "rollout.vllm={device: 1, tensor_parallel: 2, data_parallel: 1}"],
    [*VLLM, "rollout.max_batched_tokens=64", "rollout.max_num_seqs=64"],
    [*VLLM, "rollout.linear_kernels=qarl", "model.dtype=float32", "quant.scale_dtype=float32"],
    [*VLLM, "model.dtype=float16", "quant.scale_dtype=float16", "quant.grid=symmetric7"],
    [*VLLM, "quant.scheme=w8a8", "quant.scale_dtype=float32"],
    [*EXACT, "rollout.linear_kernels=qarl", "rollout.vllm.args={async_scheduling: false}"],
    [*VLLM, "rollout.temperature=0.01"],
    [*VLLM, "rollout.temperature=2", "evaluation={temperature: 0, samples: 1}"],
    [*EXACT, "rollout.temperature=0.005"],
]


@pytest.mark.parametrize("overrides", ACCEPTED, ids=" ".join)
def test_neighbours_of_refused_values_are_accepted(load, overrides):
    load(*overrides)


def test_a_former_value_is_accepted_with_one_notice(load, caplog):
    notice.cache_clear()
    configs = [load("rollout.engine=vllm", f"rollout.vllm.publish={mode}") for mode in ("changed", "changed", "full")]
    assert configs[0] == configs[1] == configs[2] and "publish: full" in configs[0].to_yaml()
    gone = "rollout.vllm.publish: changed is no longer supported; using full, which gives the same results"
    assert [record.message for record in caplog.records] == [gone]


def test_a_fault_names_the_file_or_the_command_line(minimal):
    with pytest.raises(UserError, match=r"^command line: quant.scheme = "):
        load_config(minimal, ["quant.scheme=w5"])
    minimal.write_text(minimal.read_text() + "quant: {scheme: w5}\n")
    with pytest.raises(UserError, match=rf"^{minimal}: quant.scheme = "):
        load_config(minimal)


def test_faults_are_reported_each_on_its_line_with_long_and_odd_values_quoted(load):
    with pytest.raises(UserError) as caught:
        load("quant.scheme=w5", "optim.lr=-1", "train.stps=1")
    keys = {line.split(": ")[1].split(" =")[0] for line in str(caught.value).splitlines()}
    assert keys == {"quant.scheme", "optim.lr", "train.stps"}
    with pytest.raises(UserError) as caught:
        load('quant.scheme="a\\nb' + "x" * 500 + '"')
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 250
    with pytest.raises(UserError, match=r"\{x\}\{"):
        load("data.prompt_template='{x}{'")


@pytest.mark.parametrize(
    ("overrides", "numerics", "reason"),
    [
        ([], "exact", None),
        (["rollout.linear_kernels=qarl"], "exact", None),
        (["model.dtype=float32", "quant.scheme=bf16"], "fast", "model.dtype: float32 on a GPU"),
        (["model.device=cuda", "quant.kernels=reference"], "fast", "quant.kernels: reference"),
        (["rollout.linear_kernels=vllm"], "fast", "rollout.linear_kernels: vllm"),
        (["rollout.vllm.tensor_parallel=2"], "fast", "rollout.vllm.tensor_parallel"),
        (["rollout.vllm.args={block_size: 32}"], "fast", "rollout.vllm.args.block_size"),
        (["rollout.numerics=fast"], "fast", None),
    ],
)
def test_numerics_are_exact_unless_something_rules_them_out(load, caplog, overrides, numerics, reason):
    notice.cache_clear()
    assert load(*VLLM, *overrides).rollout.numerics == numerics
    lines = [record.getMessage() for record in caplog.records if "numerics" in record.getMessage()]
    assert len(lines) == (reason is not None) and all(reason in line for line in lines)


def test_the_sampler_s_text_and_numerics_of_a_resumed_run(load):
    texts = [load(*overrides).rollout.sampler_text for overrides in ([], FAST, EXACT)]
    assert texts == ["native engine", "vLLM", "vLLM, exact numerics"]
    assert load(*FAST, "rollout.linear_kernels=qarl").rollout.sampler_text == "vLLM, exact numerics"
    begun = load(*FAST)
    assert keep_sizes(load(*VLLM), begun).rollout.numerics == "fast"
    assert keep_sizes(load(*EXACT), begun).rollout.numerics == "exact"  # which the run directory then refuses
