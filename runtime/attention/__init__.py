"""Attention backends: base.py has their interface, registry.py the list of them."""
