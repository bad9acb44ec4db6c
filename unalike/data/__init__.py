"""Data: sources by name, the user's own files and arrays, and ways to divide samples among clients.

``load`` is the one entry; it gives a ``Population``. ``list_sources()`` and ``list_partitions()`` list what there is.
"""

from unalike.data.build import list_partitions
from unalike.data.describe import Description, describe
from unalike.data.entry import from_arrays, in_pieces, load
from unalike.data.population import Population
from unalike.data.source import DataError, Source
from unalike.data.sources.catalog import list_sources

__all__ = [
    "DataError",
    "Description",
    "Population",
    "Source",
    "describe",
    "from_arrays",
    "in_pieces",
    "list_partitions",
    "list_sources",
    "load",
]
