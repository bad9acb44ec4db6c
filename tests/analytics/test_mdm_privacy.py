"""MDM in one shot for all K, under masks, with noise that clients add, and for single rows of a client."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from tests.analytics.test_mdm import federation, population
from unalike.analytics.mdm.algorithm import MDM, Start
from unalike.analytics.mdm.counts import histogram_clients
from unalike.analytics.mdm.privacy import NoisyHistograms, noise_for_budget, round_counts
from unalike.commands.main import app
from unalike.core.federation import Cohort
from unalike.core.release import Each
from unalike.data.partition.mixture import MDMError, relative_error
from unalike.privacy import Gaussian


def times(asked: object, name: str) -> int:
    return sum(row["times"] for row in asked.transcript.rows() if row["array"] == name)  # type: ignore[attr-defined]


@pytest.mark.parametrize("start", ["concentration", "random"])
def test_all_candidates_at_once_are_each_as_if_alone(start: str) -> None:
    counts, _ = population("medium-2", 80)
    settings = MDM(10, 100, rounds=6, cohort=80, start=start)  # type: ignore[arg-type]  # everyone in every round
    candidates = [1, 2, 3] if start == "concentration" else [1]
    asked = federation(counts)
    together = settings.fit_all(asked, candidates)
    assert times(asked, "growth") == 6 and times(asked, "moments") == 1
    for components, found in zip(candidates, together, strict=True):
        alone = replace(settings, components=components).fit(federation(counts))
        for name in ("tau", "alpha", "pi"):
            torch.testing.assert_close(getattr(found.mixture, name), getattr(alone.mixture, name), rtol=1e-5, atol=1e-7)
        assert found.log_likelihood == pytest.approx(alone.log_likelihood, rel=1e-6)


def test_more_candidates_cost_no_more_and_get_more_noise() -> None:
    counts, _ = population("medium-2", 400)
    settings = MDM(10, 100, rounds=3, cohort=100)
    noise = noise_for_budget(settings, 400, [2, 3, 4], epsilon=3.0, delta=1e-4, validated=False)
    asked = federation(counts)
    replace(settings, noise=noise).fit_all(asked, [2, 3, 4])
    assert asked.ledger.epsilon(1e-4) == pytest.approx(3.0, rel=0.01)
    assert noise == noise_for_budget(settings, 400, [2], epsilon=3.0, delta=1e-4, validated=False)
    # nobody's share is longer than the clip, however many candidates there are
    private = replace(settings, noise=noise, clip=5.0)
    tau, alpha = torch.full((3, 2), 0.5), torch.rand(3, 2, 10, dtype=torch.float64) + 0.1
    pi = torch.full((3, 2, 100), 0.01)
    sent = federation(counts).everyone().ask(private.expectation, into=Each("growth"), tau=tau, alpha=alpha, pi=pi)
    lengths = sent["growth"].flatten(1).norm(dim=1)
    assert float(lengths.max()) <= 5.0 * (1 + 1e-9)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 5.0))  # each of the three is at its own bound


def test_the_error_of_noisy_scores_is_that_of_a_difference_of_two() -> None:
    counts, truth = population("medium-2", 20)
    settings = MDM(10, 100, noise=Gaussian(1.0), gain_clip=3.0)
    score = settings.score(federation(counts), [truth] * 301)  # equally good: what lies between them is noise
    between = score.gain[1::2] - score.gain[2::2]
    assert len(between) == 150
    assert float(between.std()) == pytest.approx(float(score.error[1, 2]), rel=0.2)


def test_secure_sums_find_the_same() -> None:
    counts, _ = population("medium-2", 12)
    settings = MDM(10, 100, rounds=1, cohort=12, size_bins=4)
    open_, masked = federation(counts), federation(counts)
    plain, secure = settings.fit(open_), replace(settings, secure=True).fit(masked)
    for name in ("tau", "alpha", "pi"):
        torch.testing.assert_close(getattr(secure.mixture, name), getattr(plain.mixture, name), rtol=1e-4, atol=1e-5)
    assert {row["seen_as"] for row in masked.transcript.rows()} == {"secure sum"} and secure.log_likelihood == []
    mixtures = [plain.mixture, settings.fit_all(federation(counts), [1])[0].mixture]
    far = replace(settings, gain_clip=1e3)
    shown, hidden = far.score(federation(counts), mixtures), replace(far, secure=True).score(masked, mixtures)
    torch.testing.assert_close(hidden.gain, shown.gain, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(hidden.error, shown.error, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize(("start", "candidates"), [("concentration", [2]), ("concentration", [1]), ("random", [2])])
def test_the_planned_noise_is_no_more_than_its_asks_need(start: Start, candidates: list[int]) -> None:
    """Thresholds are asked for where components are told apart by their concentration, and there alone."""
    counts, _ = population("medium-2", 60)
    settings = MDM(10, 100, rounds=2, start=start, cohort=20, size_bins=4)
    noise = noise_for_budget(settings, 60, candidates, epsilon=3.0, delta=1e-3, validated=False)
    asked = federation(counts)
    replace(settings, noise=noise).fit_all(asked, candidates)
    assert asked.ledger.epsilon(1e-3) == pytest.approx(3.0, rel=0.01)


def test_with_local_noise_a_client_answers_once_and_pays_for_two_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, _ = population("medium-2", 90)
    settings = MDM(10, 100, rounds=8, noise=Gaussian(1.0), local=True, size_bins=4)
    noise = noise_for_budget(settings, 90, [2], epsilon=6.0, delta=1e-3, validated=False)
    asked, seen = federation(counts), []
    plain = Cohort.ask

    def ask(self: Cohort, *task: object, **inputs: object) -> object:
        seen.append(tuple(self.positions.tolist()))
        return plain(self, *task, **inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(Cohort, "ask", ask)
    replace(settings, noise=noise).fit(asked)
    rounds = list(dict.fromkeys(seen))
    assert sorted(client for one in rounds for client in one) == list(range(90)) and len(rounds) == 9
    assert asked.ledger.worst(1e-3) == pytest.approx(6.0, rel=0.01)
    assert {row["seen_as"] for row in asked.transcript.rows()} == {"individual"}
    assert all(row["noise"] is not None for row in asked.transcript.rows())
    with pytest.raises(MDMError, match="at most 89 rounds"):
        replace(settings, rounds=90).fit(federation(counts))
    with pytest.raises(MDMError, match=r"give noise=\.\.\."):
        MDM(10, 100, local=True)


def test_local_noise_is_made_for_any_two_answers_and_little_of_it_does_little() -> None:
    counts, truth = population("medium-1", 4000)
    settings = MDM(10, 100, components=1, rounds=19, clip=40.0, noise=Gaussian(2.0), local=True, size_bins=2)
    inputs = {"tau": torch.ones(1, 1), "alpha": truth.alpha[None], "pi": torch.full((1, 1, 2), 0.5)}
    some = federation(counts).cohort(range(300))
    noisy = some.ask(settings.expectation, **inputs)["growth"]
    exact = some.ask(settings.expectation, into=Each("growth", clip=40.0), **inputs)["growth"]
    assert float((noisy - exact).std()) == pytest.approx(2.0 * math.sqrt(2) * 40.0, rel=0.05)  # 3,300 draws: 1.2 %
    quiet = replace(settings, noise=Gaussian(1e-4)).fit(federation(counts)).mixture
    assert relative_error(quiet, truth)["alpha"] < 0.08


def test_noisy_histograms_protect_a_row() -> None:
    counts, _ = population("medium-1", 500)
    asked = federation(counts)
    method = NoisyHistograms(0.5)
    noise = asked.everyone().ask(method.histogram)["histogram"] - counts
    assert float(noise.std()) == pytest.approx(math.sqrt(2) / 0.5, rel=0.05)
    assert float(noise.abs().mean()) == pytest.approx(1 / 0.5, rel=0.05)  # of Laplace, not of Gaussian noise
    assert asked.ledger.unit == "point" and asked.ledger.worst(1e-9) == pytest.approx(0.5, rel=0.01)
    gathered = method.gather(federation(counts)).x
    assert bool((gathered >= 0).all()) and bool((gathered.sum(1) >= 1).all())


def test_noisy_counts_become_the_nearest_histogram() -> None:
    rows = torch.tensor([[5.0, -2.0, 3.0], [4.0, 0.0, 9.0], [-3.0, -1.0, -2.0], [0.2, 0.1, 0.3]])
    assert round_counts(rows).tolist() == [[4, 0, 2], [4, 0, 9], [0, 1, 0], [0, 0, 1]]
    noisy = torch.from_numpy(np.random.default_rng(0).normal(3, 4, (40, 6)))
    kept = round_counts(noisy).double()
    assert float((kept.sum(1) - noisy.sum(1).clamp(min=1)).abs().max()) <= 3.0  # by rounding alone
    grid = torch.from_numpy(np.random.default_rng(1).dirichlet(np.ones(6), 2000)) * noisy[0].sum()
    assert float((kept[0] - noisy[0]).norm()) <= float((grid - noisy[0]).norm(dim=1).min()) + 1.0


@pytest.mark.parametrize(
    ("words", "unit", "components"),
    [
        (["--epsilon", "9", "--unit", "point", "--components", "1,2"], "point", 2),
        (["--epsilon", "9", "--local", "--rounds", "4"], "client", 2),
        (["--secure", "--cohort", "4", "--rounds", "1"], None, 2),
    ],
)
def test_the_command(words: list[str], unit: str | None, components: int) -> None:
    data = ["mdm", "--data", "mdm:medium-2,clients=60,points=100", "--rounds", "5", "--json"]
    result = CliRunner().invoke(app, [*data, *words])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["privacy"] or {}).get("unit") == unit
    assert unit is None or told["privacy"]["epsilon"] <= 9.001
    assert told["secure"] == ("--secure" in words) and told["components"] <= components
    assert told["relative_error"] is None or told["relative_error"]["alpha"] > 0
    assert "give an ε" in CliRunner().invoke(app, [*data[:3], "--local"]).output


def test_a_row_with_much_data_around_it_costs_little_accuracy() -> None:
    counts, truth = population("medium-1", 2000)
    noisy = NoisyHistograms(4.0).gather(federation(counts))
    found = MDM(10, int(noisy.x.sum(1).max()), components=1, rounds=40).fit(federation(noisy.x)).mixture
    assert relative_error(found, truth)["alpha"] < 0.35
    assert isinstance(histogram_clients(noisy.x).x, torch.Tensor)
