"""Every example runs as it stands, and shows what it says."""

import ast
import importlib
import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from unalike import Clients, LocalSGD, Model, data, simulate, train
from unalike.learn.evaluation import evaluate
from unalike.networks.architectures import build

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_personalization_beats_one_model_for_all() -> None:
    results = runpy.run_path(str(EXAMPLES / "personalization.py"))["results"]
    for group in ("seen", "unseen"):
        score = {name: getattr(result, group).mean for name, result in results.items()}
        assert score["Local"] > score["FedAvg"] + 0.03
        assert score["FedAvg + fine-tuning"] > score["FedAvg"] + 0.03


@pytest.mark.long
def test_validation_rows_choose_the_encoder_and_the_round() -> None:
    done = runpy.run_path(str(EXAMPLES / "early_stopping.py"))
    score, encoder, number, _, state = done["best"]
    assert len(done["found"]) == 12 and score == max(one[0] for one in done["found"])
    assert any(one[:3] == (score, encoder, number) and one[4] is state for one in done["found"])
    assert done["result"].unlabeled.mean > 0.9, "newcomers without labels have a good model"


@pytest.mark.long
def test_clients_adapt_a_frozen_network_that_others_pretrained() -> None:
    compared = runpy.run_path(str(EXAMPLES / "adapters.py"))["main"]("digits", 2)
    methods = ["local", "fedavg", "fedavg-finetune", "flowdup", "pefll-unlabeled"]
    assert [one.method for one in compared.results] == methods
    for one in compared.results:
        assert one.failures == 0 and one.accuracy.seen.mean > 0.2, one.method  # chance is 0.1
    assert compared.results[1].bytes.up == 2 * 10 * (4 * 7120 + 4)  # ten clients sent an adapter in two rounds


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


def played(notebook: Path) -> tuple[dict[str, Any], list[Any]]:
    """What the cells of a notebook define, and what each shows: the value of its last line."""
    names, shown = dict[str, Any](), []
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body[-1]
        if isinstance(last, ast.Expr):
            tree.body[-1] = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], last.value), last)
        exec(compile(ast.fix_missing_locations(tree), f"cell {number}", "exec"), names)
        shown += [names["_"]] if isinstance(last, ast.Expr) else []
    return names, shown


def test_the_notebook_runs_from_a_table_to_predictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done, shown = played(EXAMPLES / "shops.ipynb")
    scores = {label: one.accuracy.seen.mean for label in ("fedavg", "fedavg-finetune") for one in [done["both"][label]]}
    assert scores["fedavg-finetune"] > 0.9 > scores["fedavg"] + 0.1, "AUROC: one model cannot know twenty tastes"
    assert done["right"].mean() > 0.8 and "of the new shop's later sales" in shown[-3]
    assert done["private"].privacy.epsilon <= 4 and done["private"].privacy.unit == "point"
    assert shown[-1].shape == (5, 2)
    assert "fedavg-finetune" in shown[1]._repr_html_() and "<table" in shown[-2]._repr_html_()


def test_a_wheel_has_the_examples_and_recipes_inside(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(words, cwd=EXAMPLES.parent, check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        inside = set(wheel.namelist())
    shipped = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]
    assert {f"unalike/examples/{file.name}" for file in shipped} <= inside
    assert "unalike/recipes/digits-pathological.toml" in inside


def of_the_guide(number: int, name: str, file: Path) -> Any:
    """What a block of the guide defines by this name, when it is pasted into the file."""
    guide = (EXAMPLES.parent / "docs" / "writing-a-method.md").read_text()
    file.write_text(guide.split("```python\n")[number].split("```")[0])
    return runpy.run_path(str(file))[name]


def test_the_guides_method_runs_as_it_is_pasted(tmp_path: Path) -> None:
    digits = data.load("digits", partition="pathological", clients=20, seed=0)
    method = of_the_guide(1, "FedAvg", tmp_path / "my_fedavg.py")(Model(build("mlp", digits.input_shape, 10)), cohort=5)
    before = method.start(0)
    assert not bool((train(method, simulate(digits), 1).theta == before.theta).all())


def test_the_guides_scaffold_runs_as_it_is_pasted(tmp_path: Path) -> None:
    """Two clients, one full-batch step of rate η: c_i becomes client i's own gradient, and the next round follows c."""
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 3, generator=random), torch.arange(8) % 2
    model, rate = Model(torch.nn.Linear(3, 2)), 0.5
    local = LocalSGD(steps=1, batch=None, lr=rate)
    method = of_the_guide(2, "Scaffold", tmp_path / "scaffold.py")(model, cohort=2, local=local)
    federation = simulate(Clients.from_sizes(x, y, torch.tensor([4, 4])))
    states = [method.start(0)]
    for _ in range(2):
        states.append(train(method, federation, 1, states[-1]))

    def gradient(theta: torch.Tensor) -> torch.Tensor:
        theta = theta.clone().requires_grad_()
        weight, bias = theta[:6].reshape(2, 3), theta[6:]
        torch.nn.functional.cross_entropy(x @ weight.T + bias, y).backward()
        assert theta.grad is not None
        return theta.grad

    first, second = (gradient(state.theta) for state in states[:2])
    assert torch.allclose(states[1].control, first, atol=1e-6)
    assert torch.allclose(states[2].theta, states[1].theta - rate * second, atol=1e-6)  # Σ(c − c_i) = 0
    assert federation.metrics["loss"] > 0


def test_the_guides_test_passes_as_it_is_pasted_and_fails_for_another_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "my_fedavg.py"
    of_the_guide(1, "FedAvg", file)
    name = "test_one_full_step_at_each_client_is_one_step_on_all_rows"
    test = of_the_guide(4, name, tmp_path / "test_mine.py")
    test()
    right = file.read_text()
    wrong = right.replace("state.theta + replies", "state.theta + 0.9 * replies")
    assert wrong != right
    file.write_text(wrong)
    monkeypatch.delitem(sys.modules, "my_fedavg")
    importlib.invalidate_caches()
    with pytest.raises(AssertionError):
        runpy.run_path(str(tmp_path / "test_mine.py"))[name]()
    monkeypatch.delitem(sys.modules, "my_fedavg", raising=False)
