"""What a call through the official SDK costs above the same call in process.

python -m benchmarks.server model_name=…
"""
