"""Pictures of reports: curves, overlays, heatmaps."""
