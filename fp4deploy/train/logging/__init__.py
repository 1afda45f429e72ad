"""What a training writes down: metrics, progress, running statistics, telemetry and its trackers."""
