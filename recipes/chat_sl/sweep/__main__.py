"""``python -m recipes.chat_sl.sweep recipe=sft base.model_name=… 'learning_rates=[1e-4,3e-4]'``."""

from tinker_cookbook.recipes.chat_sl.sweep.cli import main

if __name__ == "__main__":
    main()
