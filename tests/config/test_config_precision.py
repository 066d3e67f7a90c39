"""The learner's dtype, the masters' dtype, the loss scale and the diagnostics section."""

import pytest

from qarl.config.diagnostics import COSTLY, DiagnosticsConfig
from qarl.errors import UserError


def test_a_learner_of_another_dtype_scales_its_loss_or_is_refused_with_the_fix(load):
    config = load("quant.learner=full_precision", "model.learner_dtype=float16")
    assert config.loss_scale == 65536.0 and config.dynamic_loss_scale
    with pytest.raises(UserError) as caught:
        load("model.learner_dtype=float32")
    (line,) = str(caught.value).splitlines()
    assert 'model.learner_dtype = "float32"' in line and "model.dtype = bfloat16; leave null" in line
    assert "quant.learner: full_precision or fake_quant" in line


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("quant.kernels=reference", "quant.kernels: reference"),
        ("model.device=cpu", "model.device: cpu"),
        ("model.learner_dtype=float32", "model.learner_dtype: float32"),
    ],
)
def test_a_learner_in_plain_torch_has_no_fp8_backward_to_run_or_to_measure(load, override, why):
    common = ["quant={scheme: bf16, learner: full_precision}", override]
    measured = rf"diagnostics\.backward_every = 5: {why} has no Triton kernels and no FP8 matrix products; must be 0$"
    with pytest.raises(UserError, match=measured):
        load(*common, "diagnostics.backward_every=5")
    with pytest.raises(UserError, match=r"quant\.backward = .*no FP8 matrix products; use bf16$"):
        load(*common, "quant.backward=fp8")
    load(*common)


def test_costly_diagnostics_are_off_by_default_and_run_at_every_nth_step(load):
    assert not any(load().diagnostics.due(step) for step in range(1, 30))
    section = DiagnosticsConfig(shadow_every=1, deployed_every=3, gradients_every=4)
    assert section.due(1) == {"shadow"} and section.due(3) == {"shadow", "deployed"}
    assert section.due(12) == {"shadow", "deployed", "gradients"}
    assert DiagnosticsConfig(**{f"{name}_every": 2 for name in COSTLY}).due(2) == set(COSTLY)
    assert load("diagnostics.backward_every=5").diagnostics.due(5) == {"backward"}
