"""Pictures: predictions, curves, layouts and masks."""
