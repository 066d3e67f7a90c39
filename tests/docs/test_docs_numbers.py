"""Numbers in README.md and benchmarks/*.md against the records in benchmarks/results."""

import json
import math
import re
from statistics import fmean, geometric_mean

import pytest
from pages import ROOT

README = (ROOT / "README.md").read_text()
PROSE = " ".join(README.split())
SPEED = (ROOT / "benchmarks/speed.md").read_text()
SECONDS = ("step_s", "rollout_s", "learner_s", "publish_s")
ROW = re.compile(r"^\| (\w+) \| (\w+)[^|]*\| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def record(device: str) -> dict[str, dict[str, float]]:
    return json.loads((ROOT / f"benchmarks/results/schemes_{device}.json").read_text())["cases"]


def test_the_readme_is_short():
    assert len(README.encode()) <= 10_000


@pytest.mark.parametrize(("device", "column"), [("cpu", 2), ("gpu", 3)])
def test_the_table_of_alignment_is_the_record(device, column):
    section = SPEED.partition("## What alignment buys")[2].partition("\n## ")[0]
    cases, rows = record(device), [row for row in ROW.findall(section) if row[0] != "scheme"]
    assert len(rows) == 8
    for row in rows:
        scheme, learner = row[:2]
        case = cases.get(scheme if learner == "aligned" else f"{scheme} {learner}")
        mean, largest = (float(number) for number in row[column].split(","))
        assert mean == pytest.approx(case["mismatch_delta_abs_mean"], rel=0.05), row
        assert largest == pytest.approx(case["mismatch_delta_abs_max"], rel=0.05), row


def test_the_numbers_of_the_readme_are_the_records() -> None:
    off = record("gpu")["w4a16 full_precision"]
    mean, largest = off["mismatch_delta_abs_mean"], off["mismatch_delta_abs_max"]
    assert f"off by {mean:.1f} nats per token on average and by {largest:.1f} at most" in PROSE
    steps = {}
    for run in results("step_trl_gpu")["runs"]:
        rows = {row["part"]: row["step_s"] for row in run["records"] if row["what"] == "step"}
        if {"trl", "step"} <= rows.keys():
            steps[run["revision"]] = rows
    last = steps["65cb48c"]
    assert f"{last['step']:.1f} s in W4A16 and {last['trl']:.1f} s in bf16" in PROSE
    ratios = {revision: f"{rows['trl'] / rows['step']:.1f}" for revision, rows in steps.items()}
    assert f"**{ratios['65cb48c']} times as fast as TRL**" in PROSE
    assert f"gave {ratios['667a612']} and {ratios['431c03f']}" in PROSE


def test_the_numbers_of_the_readmes_picture_are_the_records() -> None:
    """Bars are rectangles; the longest of each chart is 220 units wide."""
    picture = (ROOT / "docs/images/overview.svg").read_text()
    (run,) = (run for run in results("step_trl_gpu")["runs"] if run["revision"] == "65cb48c")
    steps = {row["part"]: row["step_s"] for row in run["records"] if row["what"] == "step"}
    mismatch = record("gpu")["w4a16 full_precision"]["mismatch_delta_abs_mean"]
    for value, unit, longest in ((mismatch, "nats", mismatch), *((s, "s", steps["trl"]) for s in steps.values())):
        assert f">{value:.3g} {unit}<" in picture and f'width="{220 * value / longest:.1f}"' in picture
    assert record("gpu")["w4a16"]["mismatch_delta_abs_mean"] == 0 and ">0 nats<" in picture


def results(name: str) -> dict:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def between(page: str, start: str, end: str = "\0") -> str:
    """Return the text of a page of benchmarks/ from `start` to `end`, or to its end."""
    behind = (ROOT / f"benchmarks/{page}.md").read_text().partition(start)[2]
    assert behind, start
    return behind.partition(end)[0]


def table(after: str, page: str = "speed") -> list[list[str]]:
    """Return the cells of the rows, without the head, of the first table of a page after a text."""
    behind = between(page, after)
    lines = [line for line in behind[behind.index("\n|") + 1 :].split("\n\n")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def numbers(cell: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"[\d,]*\.?\d+", cell)]


def test_the_table_of_experts_is_the_record() -> None:
    times: dict[tuple, dict[str, float]] = {}
    for row in results("experts_gpu")["rows"]:
        if "us" in row:
            times.setdefault((row["section"], row["m"], row["routing"]), {})[row["who"]] = row["us"]
    tokens = sorted({m for _, m, _ in times})
    for scheme, *cells in table("## Mixtures of experts"):
        if "," in scheme:
            continue
        own = {key[1:]: by for key, by in times.items() if key[0] == scheme}
        ratios = {key: min(us for who, us in by.items() if who != "qarl") / by["qarl"] for key, by in own.items()}
        for m, cell in zip(tokens, cells, strict=False):
            both = [ratio for (its, _), ratio in ratios.items() if its == m]
            assert numbers(cell) == [pytest.approx(geometric_mean(both), abs=0.006)], (scheme, m)
        mean, worst = numbers(cells[len(tokens)])
        assert mean == pytest.approx(geometric_mean(list(ratios.values())), abs=0.006)
        assert worst == pytest.approx(min(ratios.values()), abs=0.006)


def test_the_table_of_a_mixtures_learner_is_the_record() -> None:
    runs = [run for run in results("learner_gpu")["runs"] if "qwen3-30b-a3b" in run["command"]]
    found: dict[str, dict[str, float]] = {}
    for row in runs[-1]["records"]:
        found.setdefault(row.get("scheme", "Hugging"), {})[row["what"]] = row["tokens_per_s"]
    rows = table("A learner of four such layers")
    assert len(rows) == len(found) == 4
    for name, forward, both, ratio, _ in rows:
        own = found[name.removeprefix("qarl ").split()[0].rstrip(",")]
        assert numbers(forward) == [pytest.approx(own["forward"], abs=1)]
        assert numbers(both) == [pytest.approx(own["forward_backward"], abs=1)]
        peer = found["Hugging"]["forward_backward"]
        assert numbers(ratio) == [pytest.approx(own["forward_backward"] / peer, abs=0.006)]


def test_the_steps_beside_trl_with_vllm_are_the_record() -> None:
    found = {}
    for run in results("step_trl_gpu")["runs"]:
        if run["revision"] == "431c03f" and "qwen3-1.7b" in run["command"]:
            exact = "exact" in run["command"]
            found |= {(row["part"], exact): row for row in run["records"] if row["what"] == "step"}
    rows = table("With vLLM 0.24 as the sampler of both")
    for cells, key in zip(rows, [("trl", False), ("step", False), ("step", True)], strict=True):
        for name, cell in zip(SECONDS, cells[1:], strict=False):
            assert numbers(cell) == [pytest.approx(found[key][name], abs=0.051)], (key, name)


def test_the_later_step_beside_trl_is_the_record() -> None:
    run = next(run for run in results("step_trl_gpu")["runs"] if run["revision"] == "65cb48c")
    found = {row["part"]: row for row in run["records"] if row["what"] == "step"}
    text = between("speed", "with nothing beside it (65cb48c): TRL ", "\n")
    seconds = [found[part][f"{name}_s"] for part in ("trl", "step") for name in ("step", "rollout", "learner")]
    assert numbers(text.replace("w4a16", "")) == pytest.approx(seconds, abs=0.051)


def test_the_steps_of_8b_on_two_gpus_are_the_record() -> None:
    runs = {run["name"]: run["records"] for run in results("step_8b_gpu")["runs"]}
    found = {name: {row["part"]: row for row in rows if row["what"] == "step"} for name, rows in runs.items()}
    for name in ("woken beside the update", "fp8"):
        for row in runs[name]:
            if row["what"] == "one_step":
                found[f"{row['scheme']} {row['step']}"] = {"step": row}
    cut = runs["one vLLM over both, again"]
    found["cut 3"] = {"step": next(row for row in cut if row.get("step") == 3)}
    order = [
        *(("beside TRL", "trl"), ("beside TRL", "step"), ("another machine", "step")),
        *((f"{scheme} {step}", "step") for scheme in ("w4a16", "fp8") for step in (2, 3)),
        *(("own GPU", "step"), ("one vLLM over both", "step"), ("cut 3", "step")),
    ]
    for cells, (name, part) in zip(table("A whole step of the same shapes", "scaling"), order, strict=True):
        for key, cell in zip(SECONDS, cells[1:], strict=False):
            assert numbers(cell) == [pytest.approx(found[name][part][key], abs=0.051)], (name, part, key)
        assert numbers(cells[5]) == [pytest.approx(found[name][part]["peak_gib"], abs=0.6)]


def test_the_largest_shapes_are_the_record() -> None:
    found: dict[tuple, list[dict]] = {}
    for run in results("largest_shape_gpu")["runs"]:
        for row in run["records"]:
            if "no time left" not in row["outcome"]:
                capped = ", held to 78 GiB" if run["memory_gib"] == 78 else ""
                found.setdefault((f"{row['gpus']}{capped}", row["offload"]), []).append(row)
    rows = table("The largest Qwen3 shapes that train")
    assert len(rows) == len(found)
    for gpus, offload, trains, peak, expected, following in rows:
        trained, *others = sorted(found[gpus, offload], key=lambda row: row["outcome"] != "trained")
        assert trained["outcome"] == "trained" and trained["shape"] == f"qwen3-{trains.lower()}"
        assert numbers(peak) == [pytest.approx(trained["peak_gib"], abs=0.051)]
        assert numbers(expected) == [pytest.approx(trained["expected_gib"], abs=0.051)]
        assert [row["outcome"] for row in others] == ["out of GPU memory"] * ("out of memory" in following)
        for row in others:
            assert numbers(following.partition(":")[2]) == [pytest.approx(row["expected_gib"], abs=0.051)]


def test_the_steps_of_a_mixture_with_vllm_are_the_record() -> None:
    runs = {run.get("name"): run["records"] for run in results("step_moe_gpu")["runs"]}
    text = between("speed", "256 responses of 512 tokens took ")
    bf16, low = (next(r for r in runs[f"vLLM samples, {s}"] if r["what"] == "step") for s in ("bf16", "w4a16"))
    step, _, rest = text.partition(" in bf16")
    told = [*numbers(step), *numbers(rest.partition(". In")[0])]
    assert told == pytest.approx([bf16[name] for name in SECONDS], abs=0.0051)
    told = text.partition("it took ")[2].partition("; at")[0]
    assert numbers(told) == pytest.approx([low[name] for name in SECONDS], abs=0.0051)
    before = next(r for r in runs["vLLM samples, w4a16, experts one by one"] if r["what"] == "step")
    told = text.partition("the publish took ")[2].partition(" s.")[0]
    assert numbers(told) == [pytest.approx(before[name], abs=0.051) for name in ("publish_s", "step_s")]


def test_the_learners_of_8b_beside_zero3_are_the_record() -> None:
    rows = next(run["records"] for run in results("ranks_gpu")["runs"] if "zero3" in run["command"])
    found = {(row["part"], row["scheme"], row["exchange"], row["what"]): row for row in rows}
    peer = found["zero3", "bf16", "with messages", "micro-batch"]
    names = [("learn", "w4a16"), ("learn", "fp8"), ("learn", "bf16"), ("zero3", "bf16")]
    for cells, key in zip(table("A learner of Qwen3-8B's shapes", "scaling"), names, strict=True):
        batch, update = (found[*key, "with messages", what] for what in ("micro-batch", "update"))
        alone = found.get((*key, "without messages", "micro-batch"))
        expected = [
            *(batch["tokens_per_s"], batch["tokens_per_s"] / peer["tokens_per_s"]),
            2 * batch["tokens_per_s"] / alone["tokens_per_s"] if alone else None,
            *(1e3 * update["seconds"], update["peak_gib"]),
            *(sum(row["received_bytes_by_kind"].values()) / 1e9 for row in (batch, update)),
        ]
        for cell, value, within in zip(cells[1:], expected, (0.6, 0.006, 0.006, 0.6, 0.06, 0.06, 0.006), strict=True):
            assert numbers(cell) == ([] if value is None else [pytest.approx(value, abs=within)]), (key, cell)


@pytest.mark.parametrize("shape", ["Qwen3-1.7B", "Qwen3-4B"])
def test_the_steps_with_an_fp8_kv_cache_are_the_record(shape: str) -> None:
    found: dict[tuple, dict[str, float]] = {}
    for run in results("step_kv_fp8_gpu")["runs"]:
        steps = [row for row in run["records"] if row["what"] == "step" and row["shape"] == shape.lower()]
        found |= {(row["scheme"], row["new_tokens"]): row for row in steps}
    rows = table(f"{shape}'s shapes, native engine")
    assert len(rows) >= 3
    for scheme, cells in zip(("bf16", "fp8", "w4a16"), rows, strict=False):
        assert cells[0].startswith(scheme)
        for tokens, (step, *parts) in ((1024, cells[1:4]), (4096, cells[4:])):
            own = found[scheme, tokens]
            seconds, *ratio = numbers(step)
            assert seconds == pytest.approx(own["step_s"], abs=0.051)
            assert ratio == [pytest.approx(found["bf16", tokens]["step_s"] / own["step_s"], abs=0.006)] * len(ratio)
            for name, cell in zip(("rollout_s", "learner_s"), parts, strict=True):
                assert numbers(cell) == [pytest.approx(own[name], abs=0.051)], (scheme, tokens, name)


def test_the_decodes_over_both_kv_caches_are_the_record() -> None:
    found: dict[tuple, float] = {}
    for run in results("decode_kv_fp8_gpu")["runs"]:
        for row in run["records"]:
            if "seconds" not in row or row.get("what") not in (None, "decode", "attention"):
                continue
            key = row["kv_cache_dtype"], "candidate" in row, row["batch"], row["context"]
            found[key] = min(row["seconds"] * 1000, found.get(key, math.inf))
    rows = table("So the KV cache counts as much")
    assert len(rows) == 4
    for case, *cells in rows:
        size = tuple(int(number) for number in numbers(case))
        auto, fp8 = (found[kind, False, *size] for kind in ("auto", "fp8"))
        assert numbers(cells[0]) == [pytest.approx(auto, abs=0.006)], case
        assert numbers(cells[1]) == [pytest.approx(fp8, abs=0.006), pytest.approx(auto / fp8, abs=0.006)], case
        for kind, cell in (("auto", cells[2]), ("fp8", cells[3])):
            assert numbers(cell) == [pytest.approx(found[kind, True, *size], abs=0.0006)], case


def test_the_rollouts_of_a_whole_mixture_are_the_record() -> None:
    found = {}
    for run in results("rollout_moe_gpu")["runs"]:
        found |= {(r["scheme"], r["kernels"], r["batch"]): r for r in run["records"] if r["what"] == "generate"}
    rows = table("The whole model in vLLM 0.24")
    assert 3 * len(rows) == len(found)
    for name, *cells, later in rows:
        scheme, kernels = name.split(", ")
        kernels = "exact" if kernels == "exact" else "vllm"
        for batch, cell in zip((8, 64, 256), cells, strict=True):
            rate, *ratio = numbers(cell)
            own, base = (found[other, kernels, batch]["tokens_per_s"] for other in (scheme, "bf16"))
            assert rate == pytest.approx(own, abs=1)
            assert ratio == [pytest.approx(own / base, abs=0.006)] * len(ratio)
        assert numbers(later) == [pytest.approx(found[scheme, kernels, 64]["later_token_s"] * 1000, abs=0.06)]


def test_the_speeds_of_exact_numerics_in_vllm_are_the_record() -> None:
    found = {}
    for run in results("vllm_exact_gpu")["runs"]:
        found |= {(r["scheme"], r["kernels"], r["batch"]): r for r in run["records"] if r["what"] == "generate"}
    rows = table("`VLLM_BATCH_INVARIANT=1`, and exact.", "vllm")
    assert len(rows) == 9
    for scheme, batch, own, exact, ratio, first, later in rows:
        records = [found[scheme, kernels, int(batch)] for kernels in ("vllm", "exact")]
        rates = [record["tokens_per_s"] for record in records]
        assert numbers(own) + numbers(exact) == [pytest.approx(rate, abs=1) for rate in rates]
        assert numbers(ratio) == [pytest.approx(rates[1] / rates[0], abs=0.006)]
        assert numbers(first) == [pytest.approx(record["first_token_s"], abs=0.0006) for record in records]
        assert numbers(later) == [pytest.approx(1000 * record["later_token_s"], abs=0.06) for record in records]
    text = between("vllm", "With `VLLM_BATCH_INVARIANT=1` vLLM's own bf16 gave", "The canary")
    rates, times = map(numbers, text.replace("fp8", "").split("exact ones"))
    cases = [(scheme, batch) for scheme in ("bf16", "fp8") for batch in (8, 64, 256)]
    for (scheme, batch), rate, faster in zip(cases, rates, times, strict=True):
        own, exact = (found[scheme, kernels, batch]["tokens_per_s"] for kernels in ("invariant", "exact"))
        assert rate == pytest.approx(own, abs=1) and faster == pytest.approx(exact / own, abs=0.006)


def test_the_table_of_exact_tokens_is_the_record() -> None:
    found = {(row["scheme"], row["engine"], row["tokens"]): row["differing"] for row in results("exact_gpu")["found"]}
    text = between("vllm", "Seen on an H200 with SmolLM2")
    rows = re.findall(r"^\| (\w+) \| (\w+) \| ([\d,]+) \|$", text, re.MULTILINE)
    assert len(rows) == 12
    assert all(found[scheme, engine, int(tokens.replace(",", ""))] == 0 for scheme, engine, tokens in rows)


def test_the_exact_tokens_of_larger_shapes_are_the_record() -> None:
    found = {(row["target"], row["scheme"], row["engine"]): row for row in results("exact_gpu")["found"]}
    native, vllm, *_ = between("vllm", "With Qwen3-1.7B's shapes and random weights").split("none off")
    for engine, text in (("native", native), ("vllm", vllm)):
        named = re.findall(r"(\w+) ([\d,]*\d)", text)
        assert len(named) == sum((target, of) == ("models/qwen3-1.7b", engine) for target, _, of in found)
        for scheme, tokens in named:
            own = found["models/qwen3-1.7b", scheme, engine]
            assert (own["tokens"], own["differing"]) == (int(tokens.replace(",", "")), 0)


def test_what_exactness_buys_in_four_bits_is_the_record() -> None:
    found = results("reproduction_exactness_w4a16_gpu")
    answers = {member["name"]: member["means_of_thirteen_steps"]["reward/math_mean"] for member in found["members"]}
    exact = [answers[f"grpo-exact-seed{seed}"][1] for seed in range(3)]
    others = [found[1] for name, found in answers.items() if name.startswith(("grpo-recompute", "grpo-bypass"))]
    text = between("reproductions", "in steps 14 to 26 it answered", "%, rec")
    named = [100 * share for share in (*exact, min(others), max(others))]
    assert numbers(text) == pytest.approx(named, abs=0.51)


def test_the_exports_of_mixtures_in_vllm_are_the_record() -> None:
    found = results("exports_mixtures_gpu")
    rows = table("with the kernels that it chooses itself for the experts")
    for name, *cells in rows:
        for family, cell in zip(("mixtral", "qwen3_moe", "qwen2_moe", "olmoe"), cells, strict=True):
            own = found[f"{family}-{name.partition(',')[0]}"]
            deltas = [pytest.approx(own[f"delta_abs_{kind}"], rel=0.04) for kind in ("mean", "max")]
            assert numbers(cell) == [*deltas, own["likeliest"], own["tokens"]], (family, name)
    assert 4 * len(rows) == sum("tokens" in row for row in found.values() if isinstance(row, dict))


@pytest.mark.parametrize(
    ("record", "lead"),
    [("exactness", "On an H200 with vLLM in bf16"), ("exactness_w4a16", "The same in W4A16 (`--profile gpu-w4a16`")],
)
def test_the_study_of_exactness_with_vllm_is_the_record(record: str, lead: str) -> None:
    found = results(f"reproduction_{record}_gpu")
    groups = found.get("first_52_steps", found)["groups"]
    assert [group["seeds"] for group in groups] == [[0, 1, 2]] * 5
    rows = table(lead, "reproductions")
    for (_, delta, k3, chi2, norm, reward, answered, step), own in zip(rows, groups, strict=True):
        of = {name: own[f"column:{name}"]["mean"] for name in ("mean |delta|", "KL (k3)", "chi2 of responses")}
        assert [*numbers(delta), *numbers(k3), *numbers(chi2)] == pytest.approx(list(of.values()), abs=6e-4)
        norms, answers = own["column:gradient norm"], own["column:answered"]
        assert numbers(norm) == pytest.approx([norms[kind] for kind in ("mean", "low", "high")], abs=0.51)
        late = [own["reward_last_quarter"][kind] for kind in ("mean", "low", "high")]
        rewards = [own["reward_first_quarter"]["mean"], *late]
        assert numbers(reward) == pytest.approx([abs(value) for value in rewards], abs=6e-4)
        assert numbers(answered) == pytest.approx([abs(100 * answers[k]) for k in ("mean", "low", "high")], abs=0.06)
        assert numbers(step) == [pytest.approx(own["step_s"]["mean"], abs=0.006)]
    exact = [member for member in found["members"] if member["name"].startswith(("reinforce-exact", "grpo-exact"))]
    assert len(exact) == 6 and all(member["column:exact"] == 0 for member in exact)


def test_the_mixtures_of_the_study_are_the_record() -> None:
    found = results("reproduction_mixture_gpu")
    groups, curves = found["groups"], found["by_step"]
    rows = table("At the GPU's size", "reproductions")
    for (_, *cells), group in zip(rows, groups, strict=True):
        other, delta, kl = (group[f"column:{head}"]["mean"] for head in ("other experts", "mean |delta|", "KL (k3)"))
        assert numbers(cells[0]) == [pytest.approx(100 * other, abs=0.051)]
        assert numbers(cells[1]) == [pytest.approx(delta, abs=0.00051)]
        assert numbers(cells[2]) == [pytest.approx(kl, abs=0.000051)]
        of_seeds = [curves[f"{group['name']}-seed{seed}"] for seed in group["seeds"]]
        for cell, name, steps, unit in (
            (cells[3], "reward/math_mean", slice(0, 10), 100),
            (cells[4], "reward/math_mean", slice(30, 40), 100),
            (cells[5], "response/length_mean", slice(30, 40), 1),
        ):
            means = [unit * fmean(curve[name][steps]) for curve in of_seeds]
            assert numbers(cell) == [pytest.approx(mean, abs=0.51) for mean in means]


def test_the_rates_of_the_mixture_are_the_record() -> None:
    runs = [run["by_step"] for run in results("reproduction_mixture_rates_cpu")["runs"]]
    rows = table("at the CPU's size", "reproductions")
    for (_, rate, early, late, most, last), run in zip(rows, runs, strict=True):
        assert float(rate) == run["optim/lr"][-1]
        right, far = run["reward/math_mean"], run["policy/kl_k3"]
        found = [100 * fmean(right[:4]), 100 * fmean(right[4:])]
        assert numbers(early) + numbers(late) == [pytest.approx(mean, abs=0.51) for mean in found]
        assert numbers(most) + numbers(last) == [pytest.approx(kl, abs=0.000051) for kl in (max(far), far[-1])]


def test_the_tables_of_staleness_are_the_record() -> None:
    columns = {
        group["name"]: {name.removeprefix("column:"): value for name, value in group.items()}
        for group in results("reproduction_staleness_gpu")["groups"]
    }
    ages, variants = (0, 1, 4, 16), ("grpo", "gspo", "tbpo", "phantom", "trl")
    for name, (_, *cells) in zip(variants, table("## Staleness", "reproductions"), strict=True):
        for age, cell in zip(ages, cells, strict=True):
            reward = columns[f"{name}-{age}"]["reward, last quarter"]
            found = [float(number) for number in re.findall(r"-?[\d.]+", cell)]
            keys = ("mean", "low", "high") if reward["low"] < reward["high"] else ("mean",)
            assert found == [pytest.approx(reward[key], abs=0.06) for key in keys], (name, age)
    rows = table("Means over all steps and seeds", "reproductions")
    for age, (_, alpha, idle, *gaps) in zip(ages, rows, strict=True):
        means = {n: {k: v["mean"] for k, v in columns[f"{n}-{age}"].items() if isinstance(v, dict)} for n in variants}
        assert numbers(alpha) == [pytest.approx(means["grpo"]["mean |alpha|"], abs=6e-4)]
        assert numbers(idle) == [pytest.approx(100 * means[n]["clipped or dropped"], abs=0.06) for n in variants[:3]]
        for name, cell in zip(variants[3:], gaps, strict=True):
            beta, *shares = numbers(cell)
            assert beta == pytest.approx(means[name]["mean |beta|"], abs=6e-5)
            lost = ("phantom clipped", "phantom, gradient lost")
            assert shares == [pytest.approx(100 * means[name][key], abs=0.06) for key in lost]


def test_the_table_of_over_sampling_is_the_record() -> None:
    rows = [numbers(" ".join(cells)) for cells in table("async_oversample_cpu.json", "scaling")]
    records = results("async_oversample_cpu")["records"]
    for row, found in zip(rows, records, strict=True):
        started, learned = found["tokens_mean_started"], found["tokens_mean_learned_from"]
        expected = found["oversample"], started, learned, 100 * (1 - learned / started), found["tokens_mean_cancelled"]
        assert row == [pytest.approx(value, abs=0.51 if i == 3 else 0.06) for i, value in enumerate(expected)]
