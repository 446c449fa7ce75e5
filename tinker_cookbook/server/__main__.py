"""``python -m tinker_cookbook.server model_name=…``."""

from tinker_cookbook.server.run import Config, main, use_compiled_loop
from tinker_cookbook.utils.entrypoint import run_entrypoint

__all__ = ["Config", "main"]

if __name__ == "__main__":
    use_compiled_loop()
    run_entrypoint(main)
