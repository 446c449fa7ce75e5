"""Images in prompts and training data of vision-language models."""
