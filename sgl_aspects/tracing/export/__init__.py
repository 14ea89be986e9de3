"""Where traces and metrics go: OpenTelemetry's exporters, files, a port for Prometheus."""
