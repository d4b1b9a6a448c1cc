"""The command `tcap`: parse, call one function of the library, print."""

__all__: list[str] = []
