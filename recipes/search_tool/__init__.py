"""Question answering with a search tool: ``python -m recipes.search_tool.train``."""
