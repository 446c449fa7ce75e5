"""The bundled engine behind HTTP: the Tinker protocol, so that the official SDK works unmodified.

``python -m tinker_cookbook.server model_name=…`` starts it; ``docs/09-server.md`` is its manual.
"""
