"""Measure artefacts on the same data, and report: runtimes behind one Protocol, latency, accuracy, gates, report."""
