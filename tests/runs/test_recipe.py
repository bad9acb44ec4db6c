from __future__ import annotations

import functools
import tomllib
from pathlib import Path

import pytest

from unalike.api import UserError
from unalike.data import entry
from unalike.data.sources.catalog import CATALOG, open_source
from unalike.runs.prepare import prepare
from unalike.runs.recipe.recipe import apply_overrides, plan_of, read_recipe, read_toml, shipped, to_recipe
from unalike.runs.recipe.settings import expand_settings, plan_for


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown key 'data\.partitoin'; did you mean 'data\.partition'\?"):
        to_recipe({"method": "fedavg", "data": {"partitoin": "iid"}}, "r.toml")
    with pytest.raises(UserError, match=r"unknown key 'ronds'; did you mean 'rounds'\?"):
        to_recipe({"method": "fedavg", "ronds": 3}, "r.toml")


def test_wrong_values_are_named_with_what_came() -> None:
    with pytest.raises(UserError, match=r"rounds = -3: expected 0 or more"):
        to_recipe({"method": "fedavg", "rounds": -3}, "r.toml")
    with pytest.raises(UserError, match="the key 'method' is missing"):
        to_recipe({"rounds": 3}, "r.toml")


def test_broken_toml_is_told_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    file.write_text("rounds = = 3")
    with pytest.raises(UserError, match=r"broken\.toml is not valid TOML: .*line 1"):
        read_toml(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not a text file"):
        read_toml(file)


def test_overrides_are_dotted_and_reach_the_method() -> None:
    values = apply_overrides(
        {"method": "fedavg", "data": {"clients": 5}},
        ["data.clients=7", "data.partition=dirichlet:0.3", "local.lr=0.05", "server.kind=adam", "local.batch=none"],
    )
    assert values["data"] == {"clients": 7, "partition": "dirichlet:0.3"}
    assert values["hyperparameters"] == {"local": {"lr": 0.05, "batch": "none"}, "server": {"kind": "adam"}}
    with pytest.raises(UserError, match="expected key=value"):
        apply_overrides({}, ["rounds"])


def test_compare_entries_are_laid_over_the_rest() -> None:
    plan = plan_of(
        {
            "rounds": 5,
            "seeds": 2,
            "hyperparameters": {"local": {"lr": 0.1}},
            "compare": [
                {"method": "local"},
                {"method": "fedavg", "label": "slow", "hyperparameters": {"local": {"lr": 0.01}}},
            ],
        },
        "r.toml",
    )
    assert [(label, recipe.seed) for label, recipe in plan.with_seeds()] == [
        ("local", 0),
        ("local", 1),
        ("slow", 0),
        ("slow", 1),
    ]
    assert plan.runs[1][1].hyperparameters == {"local": {"lr": 0.01}}
    with pytest.raises(UserError, match="two runs are called 'local'"):
        plan_of({"compare": [{"method": "local"}, {"method": "local"}]}, "r.toml")


def test_resolved_recipe_spells_everything_out_and_reads_back(tmp_path: Path) -> None:
    recipe = to_recipe(
        {"method": "fedavg-finetune", "hyperparameters": {"local": {"batch": "none"}}, "data": {"clients": 30}}, "r"
    )
    resolved = prepare(recipe).recipe
    file = tmp_path / "recipe.toml"
    file.write_text(resolved.to_toml())
    again = prepare(read_recipe(file))
    assert again.recipe == resolved
    written = tomllib.loads(file.read_text())
    assert written["model"]["name"] == "small-cnn"
    assert written["hyperparameters"]["local"]["batch"] == "none"
    assert written["hyperparameters"]["finetune"]["steps"] == 50


def test_short_names() -> None:
    assert expand_settings({"lr": 0.2, "alpha": 1.0}) == {"hyperparameters": {"local": {"lr": 0.2}}}
    steps = {"hyperparameters": {"local": {"steps": 3, "epochs": "none"}}}
    assert (
        expand_settings({"local_steps": 3}) == expand_settings(steps) == steps
    )  # one of them, in whichever way it is said
    with pytest.raises(UserError, match=r"no setting is called 'roudns'; did you mean 'rounds'\?"):
        expand_settings({"roudns": 3})
    with pytest.raises(UserError, match="not both"):
        expand_settings({"local_steps": 3, "local_epochs": 2})
    (_, recipe), *_ = plan_for(["fedavg"], {"partition": "dirichlet", "alpha": 0.3}).runs
    assert recipe.data.partition == "dirichlet:alpha=0.3"
    (_, recipe), *_ = plan_for(["fedavg"], {"classes": 3}).runs
    assert recipe.data.partition == "pathological:num_classes_per_partition=3"


def test_settings_are_left_as_they_were_given() -> None:
    given = {"local": {"steps": 3}}
    first, second = (expand_settings({"hyperparameters": given}) for _ in range(2))
    assert first == second == {"hyperparameters": {"local": {"steps": 3, "epochs": "none"}}}
    assert given == {"local": {"steps": 3}}


def test_unknown_target_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no method or recipe is called 'fedavgg'; did you mean 'fedavg'\?"):
        plan_for(["fedavgg"], {})


def test_hyperparameters_are_checked_against_the_method() -> None:
    def built(**values: object) -> object:
        return prepare(to_recipe({"method": "fedavg", "data": {"clients": 20}, "hyperparameters": values}, "r")).method

    with pytest.raises(UserError, match=r"fedavg has no hyperparameter 'local\.epoch'; did you mean 'local\.epochs'\?"):
        built(local={"epoch": 2})
    with pytest.raises(UserError, match=r"local\.lr = 'fast'"):
        built(local={"lr": "fast"})
    with pytest.raises(UserError, match=r"secure sums need a bound"):
        built(secure=True)
    with pytest.raises(UserError, match="'sgd', 'momentum', 'adam' or 'yogi'"):
        built(server={"kind": "adm"})


@pytest.mark.parametrize("name", shipped())
def test_shipped_recipes_are_valid_and_explained(name: str) -> None:
    file = shipped()[name]
    plan = plan_of(read_toml(file), str(file))
    assert plan.title, "a recipe says what it is"
    assert file.read_text().startswith("#"), "a recipe explains itself in comments"


@pytest.mark.parametrize(("method", "cohort"), [("flowdup", 100), ("fedavg-finetune", 10), ("fedtta", 11)])
def test_a_default_cohort_fits_the_clients_that_the_method_asks(method: str, cohort: int) -> None:
    """FLowDUP asks clients without labels, too, so its cohort is not cut to those that have some."""
    data = {"name": "digits", "partition": "iid", "clients": 120, "unseen": 10, "labeled": 0.1}
    prepared = prepare(to_recipe({"method": method, "rounds": 1, "data": data}, "r.toml"))
    assert prepared.method.cohort == cohort  # type: ignore[attr-defined]  # of 110 clients 11 have labels


def by_data() -> dict[str, list[Path]]:
    """The shipped recipes by the data set that they read, which takes longest: each is read once."""
    groups: dict[str, list[Path]] = {}
    for file in sorted(shipped().values()):
        groups.setdefault(plan_of(read_toml(file), file.name).runs[0][1].data.name.partition(":")[0], []).append(file)
    return groups


@pytest.mark.parametrize(("name", "files"), by_data().items())
def test_every_recipe_can_be_prepared(
    name: str, files: list[Path], real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its data is found, and every method takes the hyperparameters that it is given."""
    if not CATALOG[name].local:
        pytest.skip(f"{name} is not in the data folder and is too large to be fetched by a test")
    monkeypatch.setattr(entry, "open_source", functools.cache(open_source))
    for file in files:
        population = None
        for _, recipe in plan_of(read_toml(file), file.name).runs:
            population = prepare(recipe, population).population
        assert population is not None and (len(population.unseen) > 0) == (recipe.data.unseen != 0)


@pytest.mark.parametrize("key", ["clients", "samples", "min_samples"])
def test_numbers_of_clients_and_rows_begin_at_one(key: str) -> None:
    with pytest.raises(UserError, match=rf"data\.{key} = 0: expected 1 or more"):
        to_recipe({"method": "fedavg", "data": {key: 0}}, "r")
