"""Every example runs as it stands, and shows what it says."""

import runpy
from pathlib import Path

import pytest

from unalike import Model, data, simulate, train
from unalike.learn.evaluation import evaluate
from unalike.networks.architectures import build

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_personalization_beats_one_model_for_all() -> None:
    results = runpy.run_path(str(EXAMPLES / "personalization.py"))["results"]
    for group in (0, 1):  # seen and unseen clients
        assert results["Local"][group] > results["FedAvg"][group] + 0.03
        assert results["FedAvg + fine-tuning"][group] > results["FedAvg"][group] + 0.03


def test_own_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    federation = runpy.run_path(str(EXAMPLES / "own_arrays.py"))["federation"]
    assert federation.metrics["loss"] < 0.3
    assert "after 30 rounds" in capsys.readouterr().out


def test_a_method_from_outside_the_package() -> None:
    file = EXAMPLES / "my_method.py"
    assert len(file.read_text().splitlines()) <= 60
    digits = data.load("digits", partition="pathological", clients=40, seed=0)
    method = runpy.run_path(str(file))["FedRep"](Model(build("mlp", digits.input_shape, 10)))
    federation = simulate(digits)
    state = train(method, federation, 5)
    body = method.is_head() == 0
    assert bool((state.theta[~body] == method.start(0).theta[~body]).all())  # heads are never averaged
    unseen = federation.runtime.roster.select(digits.unseen)
    scores = evaluate(method.model, lambda c: method.personalize(state, c), federation, unseen)
    assert scores.mean > 0.85


def test_the_guides_method_runs_as_it_is_pasted(tmp_path: Path) -> None:
    guide = (EXAMPLES.parent / "docs" / "writing-a-method.md").read_text()
    (tmp_path / "guide.py").write_text(guide.split("```python\n")[1].split("```")[0])
    digits = data.load("digits", partition="pathological", clients=20, seed=0)
    method = runpy.run_path(str(tmp_path / "guide.py"))["FedAvg"](Model(build("mlp", digits.input_shape, 10)), cohort=5)
    before = method.start(0)
    assert not bool((train(method, simulate(digits), 1).theta == before.theta).all())
