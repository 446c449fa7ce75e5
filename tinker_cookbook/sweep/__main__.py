"""``python -m tinker_cookbook.sweep RECIPE key=a,b,c log_dir=FOLDER``."""

import sys

from tinker_cookbook.sweep.run import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
