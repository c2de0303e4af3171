"""The gateway's HTTP front. Imported only where `http_listen` is set."""
