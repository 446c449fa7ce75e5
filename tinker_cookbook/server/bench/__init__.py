"""What a call through the official SDK costs above the same call in process.

python -m tinker_cookbook.server.bench model_name=…
"""
