"""The model classes; loader/model_config.py names them without importing them."""
