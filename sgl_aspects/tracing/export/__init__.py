"""Destinations of traces and metrics: OpenTelemetry's exporters, files, a port for Prometheus."""
