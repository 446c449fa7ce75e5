"""Image classifiers made of vision-language models: ``python -m recipes.vlm_classifier.train``."""
