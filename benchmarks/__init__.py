"""Measurements of whole training steps; not part of the package that is installed."""
