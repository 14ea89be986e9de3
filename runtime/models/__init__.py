"""The model classes; registry.py names them without importing them."""
