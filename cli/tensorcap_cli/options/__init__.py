"""Options that several commands share, each with one name, one meaning and one help text.

`sections` lays out the help texts; `archives` has the options of commands that read archives, `run` those
that say what is run, `recording` those that say what is recorded, and `time_limit` has `--timeout`.
"""
