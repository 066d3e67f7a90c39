"""Upper limits of numbers and texts in the configuration.

They are far above any real run, and low enough for the types that hold derived values: int64 for counts and their
products, float32 for factors, and 31 bits of milliseconds for the timeouts of poll().
"""

from qarl.inputs.schema import STEP_LIMIT

STEPS = STEP_LIMIT  # 10^9; optimizer steps are at most STEPS * EPOCHS * RESPONSES = 10^18
EPOCHS = 100
PROMPTS = 10**6  # per step
SAMPLES = 10_000  # responses per prompt
RESPONSES = 10**7  # per step
ROWS = 10**9  # per data set
TOKENS = 10**8  # per text or batch; the longest contexts today have 10^7
POOL_TOKENS = 10**10  # per KV cache; 10^16 bytes at 1 MB per token
STEP_TOKENS = 10**12  # in all responses of a step
SEQUENCES = 10**5  # decoded together
VOCABULARY = 10**8  # token ids
FILES = 10**6  # kept files of one kind, and similar counts
THREADS = 1024
WORKERS = 256  # processes
DEVICES = 1024  # GPUs per machine
MOST_STALE = 64  # steps that asynchronous rollouts may be ahead
KV_PAGE = 64  # tokens per page of the native sampler's KV cache

SECONDS = 1e6  # 11 days; poll() accepts up to 24 days
FACTOR = 1e9  # weights, coefficients, ratios and their bounds
SCORE = 1e9  # sums of rewards and log-ratios
LEARNING_RATE = 1e3
LOSS_SCALE = 1e30  # float32 ends at 3.4e38
SMALLEST = 1e-30  # for divisors; the smallest normal float32 is 1e-38
TEMPERATURE = 1e4
SMALLEST_TEMPERATURE = 1e-4  # below it, logits / temperature overflows
VLLM_TEMPERATURES = (1e-2, 2.0)  # vLLM (0.24 to 0.32) raises lower nonzero ones and rejects higher ones

ITEMS = 1000  # per list or mapping
IDS = 10_000  # per list of token ids
NAME = 255  # characters
TEXT = 100_000  # characters
VALUES = 10_000  # per free-form mapping, nested values included
DEPTH = 16  # levels of a free-form mapping
