"""Continuous batching: which tokens the model sees in a step."""
