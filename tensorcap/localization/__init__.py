"""Which module is wrong: evidence against modules, suspects, and where errors begin.

Two archives, and a model if there is one, go in; a `Localization` or a bisection comes out. Read `evidence`
(what a replay, an injection or the archives show), `suspect` (the result), `curves` and `nonfinite` (where
errors and non-finite values begin), `ranking`, `localization`; then `archive_bisection`, `live_bisection`,
`bisection`; `weights` and `verification` are parts of what `tensorcap.verification` does.
"""
