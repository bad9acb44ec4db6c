"""Every source by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unalike.data import spec
from unalike.data.source import Source
from unalike.data.sources import images, questions, splits, synthetic, tables, text
from unalike.data.sources.folder import File, present


@dataclass(frozen=True)
class Entry:
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


def _made(name: str, description: str, load: Callable[..., Source]) -> Entry:
    return Entry(name, description, load, seeded=True, synthetic=True)


_ENTRIES = [
    Entry("digits", "8×8 handwritten digits, embedded in scikit-learn", images.digits),
    Entry("mnist", "28×28 handwritten digits", images.mnist, images.MNIST_FILES),
    Entry("fashion-mnist", "28×28 pictures of clothes", images.fashion_mnist, images.FASHION_FILES),
    Entry("cifar-10", "32×32 colour pictures, 10 classes", images.cifar10, (images.CIFAR_ARCHIVE,), images.CIFAR_FILES),
    Entry("cifar-100", "32×32 colour pictures, 100 classes", images.cifar100, (images.CIFAR100_ARCHIVE,)),
    Entry("stl-10", "96×96 colour pictures, 10 classes", images.stl10, (images.STL_ARCHIVE,)),
    Entry("femnist", "28×28 handwritten characters by writer", images.femnist, (images.FEMNIST_FILE,)),
    Entry("shakespeare", "plays by role: the next character", text.shakespeare, (text.SHAKESPEARE_FILE,)),
    Entry("inaturalist", "pictures of species by user or place", splits.inaturalist, (splits.INATURALIST_SPLITS,)),
    Entry("landmarks", "pictures of landmarks by user", splits.landmarks, (splits.LANDMARKS_SPLITS,)),
    Entry(
        "stack-overflow",
        "questions by user: embeddings or word counts",
        questions.stack_overflow,
        (questions.STACK_OVERFLOW_FILE,),
        (questions.EMBEDDINGS,),
        seeded=True,
    ),
    Entry("yahoo-answers", "questions of ten topics", questions.yahoo_answers, (questions.YAHOO_ARCHIVE,)),
    Entry("acs", "US Census persons by district or state", tables.acs, (tables.ACS_FILE,), seeded=True),
    Entry("elections", "winners in US counties, 2000–2020", tables.elections, (tables.ELECTIONS_FILE,)),
    _made("gaussian-mixture", "points of a Gaussian mixture, for clustering", synthetic.gaussian_mixture),
    _made("least-squares", "linear regression, one truth or slightly different ones", synthetic.least_squares),
    _made("logistic-regression", "two classes by a linear score, one truth or several", synthetic.logistic_regression),
    _made("linear-prior", "linear regressions whose truths share a Gaussian prior", synthetic.linear_prior),
    _made("gaussian-means", "Gaussian samples around personal means", synthetic.gaussian_means),
    _made("bernoulli", "coins of different bias", synthetic.bernoulli),
    _made("mdm", "label histograms from a mixture of Dirichlet-multinomials", synthetic.mdm),
]
CATALOG = {entry.name: entry for entry in _ENTRIES}


def list_sources() -> list[Entry]:
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
