"""No module of qarl unpickles arbitrary objects or accepts connections of other users."""

import ast
from pathlib import Path

import pytest

import qarl

UNSAFE_MODULES = {
    *["pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "multiprocessing"],
    *["copyreg", "jsonpickle"],
}
UNSAFE_CALLS = {("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load")}
UNSAFE_CALLS |= {("torch", "load"), ("numpy", "load"), ("np", "load")}
# These two functions of torch describe and open memory; neither reads an object.
TAKEN_APART = {"torch.multiprocessing.reductions": {"rebuild_cuda_tensor", "reduce_tensor"}}
STORES = {"TCPStore", "StatelessProcessGroup", "create_server", "SimpleQueue", "Manager", "Listener", "listen"}


def findings(source: str) -> list[str]:
    """Return one line per import or call that unpickles or accepts connections."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if _unsafe(name.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {name.name for name in node.names}
            if _unsafe(node.module) and not names <= TAKEN_APART.get(node.module, set()):
                found.append(f"{node.module}: {', '.join(sorted(names))}")
            found += sorted(names & STORES)
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute):
                owner = called.value.id if isinstance(called.value, ast.Name) else ""
                weights_only = any(
                    key.arg == "weights_only" and isinstance(key.value, ast.Constant) and key.value.value is True
                    for key in node.keywords
                )
                if (owner, called.attr) in UNSAFE_CALLS and not weights_only:
                    found.append(f"{owner}.{called.attr}")
                if called.attr in STORES or (called.attr == "recv" and not node.args):  # of a Connection: unpickles
                    found.append(f".{called.attr}()")
                if called.attr.endswith("_object_list") or called.attr == "all_gather_object":
                    found.append(f".{called.attr}()")
            elif isinstance(called, ast.Name) and called.id in {*STORES, "eval", "exec"}:
                found.append(f"{called.id}()")
    return found


def _unsafe(module: str) -> bool:
    return bool(set(module.split(".")) & UNSAFE_MODULES)


@pytest.mark.parametrize(
    "source",
    [
        *[
            "import pickle",
            "from multiprocessing import Pipe",
            "torch.load(path, weights_only=False)",
            "yaml.load(text)",
        ],
        *["connection.recv()", "dist.broadcast_object_list(x)", "eval(x)", "from torch.distributed import TCPStore"],
    ],
)
def test_the_search_finds_unsafe_code(source: str) -> None:
    assert findings(source)


KNOWN = {
    # Launchers such as torchrun name the address of the store; rank 0 listens there, as with the rendezvous of torch.
    "distributed/rendezvous.py": [".TCPStore()", ".TCPStore()"],
    "rewards/programs.py": ["pickle"],  # reads text only, as LiveCodeBench packs its tests: test_reward_code.py
    "rollout/vllm/channel.py": ["pickle"],  # creates objects of listed classes only: tests/rollout_vllm/test_channel.py
}


def test_nothing_in_qarl_unpickles_or_listens() -> None:
    package = Path(qarl.__file__).parent
    faults = {
        str(path.relative_to(package)): found
        for path in sorted(package.rglob("*.py"))
        if (found := findings(path.read_text()))
    }
    assert faults == KNOWN
