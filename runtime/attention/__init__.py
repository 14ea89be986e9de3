"""Attention backends: base.py says what one does, registry.py which there are."""
