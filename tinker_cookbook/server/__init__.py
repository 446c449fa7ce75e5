"""HTTP server of the bundled engine: the Tinker protocol, for the unmodified official SDK.

``python -m tinker_cookbook.server model_name=…`` starts it; ``docs/server.md`` describes it.
"""
