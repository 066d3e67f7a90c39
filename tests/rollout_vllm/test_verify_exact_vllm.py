"""`qarl verify-exact --engine vllm` on vLLM's CPU build: what agrees, then a fault, which the trace finds."""

import json

import pytest
from needs_vllm import needs_cpu_build

pytestmark = [pytest.mark.slow, needs_cpu_build]

# From the second round on, vLLM's decoder has another epsilon in one norm; rounds are as small as they can be.
FAULT = """
from qarl.exactness.engines import VLLM
from qarl.exactness.request import Sizes
Sizes.prompts = lambda self, response, drawn=0: 2
real, rounds = VLLM.sample, []
def draw(self, one):
    rounds.append(one)
    if len(rounds) == 2:
        decoder = self._engine._sampler._host.numerics.forward.decoder
        decoder.layers[1].mlp_norm.eps = 1e-2
    return real(self, one)
VLLM.sample = draw
"""


def test_a_fault_is_found_in_its_round_layer_and_operation(qarl_with_vllm, tiny_model, tmp_path):
    out = tmp_path / "found.json"
    size = ("--tokens", 200, "--longest", 50, "--engine", "vllm", "--top-k", 50)
    done = qarl_with_vllm.run("verify-exact", tiny_model(head_dim=32), *size, "--json", out, before=FAULT)
    assert done.code == 1 and out.exists(), done.err
    found = json.loads(out.read_text())
    first = found["first"]
    assert found["engine"] == "vllm" and not found["exact"], done.err
    assert (first["round"], first["layer"], first["operation"]) == (1, 1, "mlp_norm"), done.out
    assert first["operation_position"] < first["position"] and first["note"] == ""
    assert "the forwards diverge at layer 1, mlp_norm (the norm before the MLP)" in done.out
