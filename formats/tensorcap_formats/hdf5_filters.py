"""Filters of compressed HDF5 datasets, which the library finds only once hdf5plugin is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorcap_formats.errors import ReadError, missing_package

if TYPE_CHECKING:
    import h5py


def require_filters(dataset: h5py.Dataset, source: str) -> None:
    """Make the filters of a dataset available.

    Raises:
        MissingPackageError: One of them is not part of HDF5, and hdf5plugin is not installed.
        ReadError: hdf5plugin has it neither.
    """
    from h5py import h5z

    properties = dataset.id.get_create_plist()
    filters = [properties.get_filter(number)[0] for number in range(properties.get_nfilters())]
    if all(map(h5z.filter_avail, filters)):
        return
    try:
        import hdf5plugin  # noqa: F401  # registers its filters when it is imported
    except ImportError:
        raise missing_package(f"reading {source}", "hdf5plugin", extra="compress") from None
    for number in filters:
        if not h5z.filter_avail(number):
            raise ReadError(f"{source}: is compressed by HDF5 filter {number}, which is not installed")
