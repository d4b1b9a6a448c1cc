"""Compare two archives: pairs of records, a status for each, and what a report says beside them.

In come two archives with equal keys (`tensorcap.alignment` makes them so); out comes a `Comparison`. Read
`pair` (the data, and `decide`, the one place that writes a status), `pairing`, `pipeline` (the whole way);
then what decides: `exact`, `thresholds`, `calibration`, `judge` with `policy` and `policy_tests`, `routing`;
then what is said besides: `divergence`, `warnings`, `blind_spots`, `baseline`, `explanation`, `preflight`.
"""
