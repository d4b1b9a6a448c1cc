"""The commands of `tcap`, a module for each: it parses, calls one function of the library, and prints.

`tensorcap_cli.main` imports a module when its command is called; each has its click command as `command`.
"""
