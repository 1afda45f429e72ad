"""Many trainings or many measurements: sweeps over variants and seeds, the sensitivity study."""
