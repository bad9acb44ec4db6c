"""Data: sources by name, the user's own files and arrays, and ways to divide samples among clients.

``load`` is the one entry; it gives a ``Population``. ``sources()`` and ``partitions()`` list what there is.
"""

from motley.data.build import partitions
from motley.data.describe import Description, describe, write_figure
from motley.data.entry import from_arrays, load
from motley.data.population import Population
from motley.data.source import DataError, Source
from motley.data.sources import sources

__all__ = [
    "DataError",
    "Description",
    "Population",
    "Source",
    "describe",
    "from_arrays",
    "load",
    "partitions",
    "sources",
    "write_figure",
]
