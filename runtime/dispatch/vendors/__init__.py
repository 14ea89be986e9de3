"""Vendors whose operators come with this package: a folder each, found by :mod:`..backends`."""
