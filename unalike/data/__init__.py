"""Data: sources by name, the user's own files and arrays, and ways to divide samples among clients.

``load`` is the one entry; it gives a ``Population``. ``list_sources()`` and ``list_partitions()`` list what there is.
"""

from unalike.data.describe import Description, describe
from unalike.data.entry import from_arrays, from_dataset, load, load_lazily
from unalike.data.partition.assignment import list_partitions
from unalike.data.partition.schemes import conditional_partition, iid_partition, mdm_partition
from unalike.data.population import Population
from unalike.data.schema_file import write_schema
from unalike.data.source import DataError, Source
from unalike.data.sources.catalog import list_sources

__all__ = [
    "DataError",
    "Description",
    "Population",
    "Source",
    "conditional_partition",
    "describe",
    "from_arrays",
    "from_dataset",
    "iid_partition",
    "list_partitions",
    "list_sources",
    "load",
    "load_lazily",
    "mdm_partition",
    "write_schema",
]
