"""A page for the machine without Grafana. Imported only where the settings ask for it."""
