"""Writing an archive: the flat file, its journal, publishing it, recovering it."""
