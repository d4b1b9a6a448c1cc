"""Archives of ours: whatever the container, an index says what they hold."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tensorcap_formats.archive import Archive
from tensorcap_formats.index import Index


class IndexedArchive(Archive):
    """Base class of the readers of our containers."""

    def __init__(
        self, path: Path, container: str, index: Index, resources: ExitStack, *, trusts_digests: bool = False
    ) -> None:
        """Take over the resources, which `close` closes."""
        super().__init__(
            path,
            container,
            index.records,
            is_ordered=index.is_ordered,
            is_complete=index.is_complete,
            run=index.run,
            values=index.values,
            algorithm=index.algorithm,
            root=index.root,
            trusts_digests=trusts_digests,
        )
        self._resources = resources.pop_all()

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._resources.close()
