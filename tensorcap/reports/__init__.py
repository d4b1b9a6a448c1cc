"""Results as files and text: JSON, saved comparisons, JUnit, CSV, plots, the folder of a verification.

Results of comparison and localization go in. Read `ranking` and `examination` (what is shown of a
comparison), `result_json`, `decoding` and `results` (saved, read and judged again), `exports`; `suspects`,
`layer_report`, `error_plot`, `verification_text` and `verification_files`; `equivalence` (files of that
method).
"""
