"""Reward functions that do what the completions say, and helpers of the tests of their pool."""

import time

from qarl.rewards import RewardPool

# Each completion is an order: what the function does with it.
FUNCTIONS = r"""
import os, re, signal, subprocess, sys, time

def orders(completions, prompts, **columns):
    scores = []
    for order in completions:
        if order == "raise":
            raise ValueError("I was\ntold to")
        elif order == "exit":
            sys.exit("bye")
        elif order == "die":
            os._exit(3)
        elif order == "hold the GIL":
            os.write(2, b"holding\n")
            re.match(r"(a+)+$", "a" * 60 + "b")
        elif order.startswith("child "):
            child = subprocess.Popen(["sleep", "3600"])
            path = order.removeprefix("child ")
            with open(path + ".part", "w") as file:
                file.write(str(child.pid))
            os.rename(path + ".part", path)
            child.wait()
        elif order == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            scores.append(5.0)
        elif order == "print":
            print("printed by the reward")
            os.write(1, b"\x00\x01 written to fd 1\n")
            scores.append(4.0)
        elif order.startswith("return "):
            return eval(order.removeprefix("return "), {"c": completions})
        else:
            scores.append(float(order))
    return scores

def whole_batches_only(completions, prompts, **columns):
    if len(completions) > 1:
        raise RuntimeError("too many at once")
    return [float(completions[0])]

def answers(completions, prompts, answer, **columns):
    return [float(c == a) for c, a in zip(completions, answer)]

def pids(completions, prompts, **columns):
    time.sleep(0.2)
    return [os.getpid()] * len(completions)
"""


def prompts(completions: list[str]) -> list[str]:
    return ["p"] * len(completions)


def score(rewards: RewardPool, *completions: str):
    return rewards.score(list(completions), prompts(completions), {})


def wait_until(condition, limit_s: float = 60.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False
