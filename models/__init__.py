"""The bundled demo model pair (``models/demo``) and how it was trained."""
