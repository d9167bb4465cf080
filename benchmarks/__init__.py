"""Speed and scale, measured: ``python -m benchmarks`` runs what is here; docs/performance.md shows the result."""
