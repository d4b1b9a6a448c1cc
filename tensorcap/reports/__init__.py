"""Results as files and text: JSON, saved comparisons, JUnit, CSV, plots, the folder of a verification.

Results of comparison and localization go in. Read `pair_examination` (locations, logits and routing of
pairs), `json_decoder` and `results` (saved, read and judged again), `exports`; `suspects`, `layer_report`,
`figure` and `error_plot`, `html` (a page to look at), `verification_text` and `verification_files`;
`equivalence` (files of that method).
"""
