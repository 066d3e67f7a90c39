"""The tops of the configuration's numbers and texts: far above any run, and low enough that what the code makes of them
fits: counts and their products int64, factors float32, waits the 31 bits of milliseconds that poll() takes.
"""

from __future__ import annotations

from qarl.inputs.schema import STEP_LIMIT

STEPS = STEP_LIMIT  # 10^9; optimizer steps are at most STEPS * EPOCHS * RESPONSES = 10^18
EPOCHS = 100
PROMPTS = 10**6  # of a step
SAMPLES = 10_000  # responses of one prompt
RESPONSES = 10**7  # of a step
ROWS = 10**9  # of a data set
TOKENS = 10**8  # of one text, or of one batch; the longest contexts there are have 10^7
POOL_TOKENS = 10**10  # of a KV cache; with a megabyte a token 10^16 bytes
STEP_TOKENS = 10**12  # of all responses of a step
SEQUENCES = 10**5  # decoded together
VOCABULARY = 10**8  # token ids
FILES = 10**6  # of anything that is kept
THREADS = 1024
WORKERS = 256  # processes
DEVICES = 1024  # GPUs of a machine
MOST_STALE = 64  # steps that asynchronous rollouts may be ahead
KV_PAGE = 64  # tokens, of the native sampler's KV cache

SECONDS = 1e6  # 11 days; poll() takes up to 24
FACTOR = 1e9  # weights, coefficients, ratios and their bounds
SCORE = 1e9  # sums of rewards and log-ratios
LEARNING_RATE = 1e3
LOSS_SCALE = 1e30  # float32 ends at 3.4e38
SMALLEST = 1e-30  # of what is divided by; float32 holds no less than 1e-38
TEMPERATURE = 1e4
SMALLEST_TEMPERATURE = 1e-4  # a smaller one makes infinities of logits
VLLM_TEMPERATURES = (1e-2, 2.0)  # vLLM (0.24 to 0.32) raises lower ones to the first, but 0, and refuses higher ones

ITEMS = 1000  # of a list or mapping
IDS = 10_000  # of a list of token ids
NAME = 255  # characters
TEXT = 100_000  # characters
VALUES = 10_000  # of a free mapping, nested ones counted
DEPTH = 16  # of a free mapping
