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
class Entry:
    """One named source: what it is, how it is made, and the files it needs."""

    description: str
    load: Callable[..., Source]
    files: tuple[File, ...] = ()
    seeded: bool = False  # the loader takes a seed first
    synthetic: bool = False


@dataclass(frozen=True)
class Listed:
    """A line of the list of sources."""

    name: str
    description: str
    local: bool  # it can be loaded with no network
    downloadable: bool
    synthetic: bool
    options: tuple[str, ...]


def _made(description: str, load: Callable[..., Source]) -> Entry:
    return Entry(description, load, seeded=True, synthetic=True)


CATALOG: dict[str, Entry] = {
    "digits": Entry("8×8 handwritten digits, embedded in scikit-learn", images.digits),
    "mnist": Entry("28×28 handwritten digits", images.mnist, images.MNIST_FILES),
    "fashion-mnist": Entry("28×28 pictures of clothes", images.fashion_mnist, images.FASHION_FILES),
    "cifar-10": Entry("32×32 colour pictures, 10 classes", images.cifar10, (images.CIFAR_ARCHIVE,)),
    "femnist": Entry("28×28 handwritten characters by writer", images.femnist, (images.FEMNIST_FILE,)),
    "shakespeare": Entry("plays by role: the next character", text.shakespeare, (text.SHAKESPEARE_FILE,)),
    "acs": Entry("US Census persons by district or state", tables.acs, (tables.ACS_FILE,), seeded=True),
    "elections": Entry("winners in US counties, 2000–2020", tables.elections, (tables.ELECTIONS_FILE,)),
    "gaussian-mixture": _made("points of a Gaussian mixture, for clustering", synthetic.gaussian_mixture),
    "least-squares": _made("linear regression, one truth or slightly different ones", synthetic.least_squares),
    "linear-prior": _made("linear regressions whose truths share a Gaussian prior", synthetic.linear_prior),
    "gaussian-means": _made("Gaussian samples around personal means", synthetic.gaussian_means),
    "bernoulli": _made("coins of different bias", synthetic.bernoulli),
    "mdm": _made("label histograms from a mixture of Dirichlet-multinomials", synthetic.mdm),
}


def list_sources() -> list[Listed]:
    """All named sources, with a line about each and whether it is there already."""
    return [
        Listed(
            name=name,
            description=entry.description,
            local=present(*entry.files) or (name == "cifar-10" and present(*images.CIFAR_FILES)),
            downloadable=all(file.url is not None for file in entry.files),
            synthetic=entry.synthetic,
            options=tuple(spec.options(entry.load, hidden=int(entry.seeded))),
        )
        for name, entry in CATALOG.items()
    ]


def open_source(named_source: str, seed: int, **options: Any) -> Source:
    """A named source from ``name`` or ``name:value,key=value``; ``options`` are the same by keyword."""
    name, values, named = spec.parse(named_source)
    if name not in CATALOG:
        raise spec.unknown("data set", name, list(CATALOG))
    entry = CATALOG[name]
    bound = spec.bind(f"data set {name!r}", entry.load, values, {**named, **options}, hidden=int(entry.seeded))
    return entry.load(seed, **bound) if entry.seeded else entry.load(**bound)
