"""Commands that make something: from training to predictions."""
