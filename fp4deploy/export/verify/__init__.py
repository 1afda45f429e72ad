"""Gates between torch and what was exported: outputs on real images, and layer by layer."""
