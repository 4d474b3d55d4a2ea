"""The bench suite: cases, contenders, timing, results, reports. `docs/bench.md` describes it."""
