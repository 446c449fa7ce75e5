"""Where metrics go; the public door is ``tinker_cookbook.utils.ml_log``."""
