"""The chassis of a service: settings, life cycle, security, logs, metrics and traces."""
