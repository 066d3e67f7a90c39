"""The paper estimate: its models have the parameters that their names say, and the page has its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import scaling_estimate

ROOT = Path(__file__).parents[2]


SIZES = [("8B", 8.19e9, 7.57e9), ("30B-A3B", 30.5e9, 3.04e9), ("235B-A22B", 235e9, 21.6e9)]


@pytest.mark.parametrize(("name", "parameters", "active"), SIZES)
def test_shapes(name, parameters, active):
    model = scaling_estimate.MODELS[name]
    assert model.parameters == pytest.approx(parameters, rel=2e-3)
    assert scaling_estimate.active(model) == pytest.approx(active, rel=2e-3)


def test_every_rank_has_a_micro_batch_and_all_have_the_tokens():
    for ranks in scaling_estimate.RANKS:
        tokens, rounds = scaling_estimate.of_a_rank(ranks)
        assert tokens * rounds * ranks == scaling_estimate.TOKENS


def test_the_page_has_its_tables(monkeypatch, capsys):
    monkeypatch.setattr(scaling_estimate, "MODELS", {"8B": scaling_estimate.MODELS["8B"]})
    scaling_estimate.main()
    page = (ROOT / "docs" / "scaling.md").read_text()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * (2 + 3) + 2
    assert all(line in page for line in lines)
