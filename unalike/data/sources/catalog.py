"""Every source by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unalike.data import spec
from unalike.data.source import Source
from unalike.data.sources import images, synthetic, tables, text
from unalike.data.sources.folder import File, present


@dataclass(frozen=True)
class NamedSource:
    """One named source: what it is, how it is made, and the files it needs."""

    name: str
    description: str
    load: Callable[..., Source]
    files: tuple[File, ...] = ()
    instead: tuple[File, ...] = ()  # these do as well
    seeded: bool = False  # the loader takes a seed first
    synthetic: bool = False

    @property
    def local(self) -> bool:
        """Can it be loaded with no network?"""
        return present(*self.files) or (bool(self.instead) and present(*self.instead))

    @property
    def downloadable(self) -> bool:
        return all(file.url is not None for file in self.files)

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(spec.options(self.load, hidden=int(self.seeded)))


def _synthetic(name: str, description: str, load: Callable[..., Source]) -> NamedSource:
    return NamedSource(name, description, load, seeded=True, synthetic=True)


_ENTRIES = [
    NamedSource("digits", "8×8 handwritten digits, embedded in scikit-learn", images.digits),
    NamedSource("mnist", "28×28 handwritten digits", images.mnist, images.MNIST_FILES),
    NamedSource("fashion-mnist", "28×28 pictures of clothes", images.fashion_mnist, images.FASHION_FILES),
    NamedSource(
        "cifar-10", "32×32 colour pictures, 10 classes", images.cifar10, (images.CIFAR_ARCHIVE,), images.CIFAR_FILES
    ),
    NamedSource("cifar-100", "32×32 colour pictures, 100 classes", images.cifar100, (images.CIFAR100_ARCHIVE,)),
    NamedSource("femnist", "28×28 handwritten characters by writer", images.femnist, (images.FEMNIST_FILE,)),
    NamedSource("shakespeare", "plays by role: the next character", text.shakespeare, (text.SHAKESPEARE_FILE,)),
    NamedSource("acs", "US Census persons by district or state", tables.acs, (tables.ACS_FILE,), seeded=True),
    NamedSource("elections", "winners in US counties, 2000–2020", tables.elections, (tables.ELECTIONS_FILE,)),
    _synthetic("gaussian-mixture", "points of a Gaussian mixture, for clustering", synthetic.gaussian_mixture),
    _synthetic("least-squares", "linear regression, one truth or slightly different ones", synthetic.least_squares),
    _synthetic(
        "logistic-regression", "two classes by a linear score, one truth or several", synthetic.logistic_regression
    ),
    _synthetic("linear-prior", "linear regressions whose truths share a Gaussian prior", synthetic.linear_prior),
    _synthetic("gaussian-means", "Gaussian samples around personal means", synthetic.gaussian_means),
    _synthetic("bernoulli", "coins of different bias", synthetic.bernoulli),
    _synthetic("mdm", "label histograms from a mixture of Dirichlet-multinomials", synthetic.mdm),
]
CATALOG = {entry.name: entry for entry in _ENTRIES}


def list_sources() -> list[NamedSource]:
    """All named sources, with a line about each and whether it is there already."""
    return _ENTRIES


def open_source(named_source: str, seed: int, **options: Any) -> Source:
    """A named source from ``name`` or ``name:value,key=value``; ``options`` are the same by keyword."""
    name, values, named = spec.parse(named_source)
    if name not in CATALOG:
        raise spec.unknown("data set", name, list(CATALOG))
    entry = CATALOG[name]
    bound = spec.bind(f"data set {name!r}", entry.load, values, {**named, **options}, hidden=int(entry.seeded))
    return entry.load(seed, **bound) if entry.seeded else entry.load(**bound)
