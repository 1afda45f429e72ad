"""Commands that show what there is: reports, layers, settings, provenance."""
