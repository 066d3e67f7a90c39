"""vLLM as the rollout engine.

engine.py     the engine of the training loop, in the learner's process: starts, restarts, publishes
launch.py     vLLM's settings from a run's configuration; process.py, inline.py: handles of a vLLM process
channel.py    messages between the processes; settings.py: their types
host.py       the vLLM in the sampler's process (../vllm_worker.py)
numerics.py   interface of `exact/` (the policy's forward inside vLLM) and `own_kernels/` (vLLM's model and kernels)
"""
