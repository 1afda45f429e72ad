"""Figures of reports: curves, predictions, heatmaps."""
