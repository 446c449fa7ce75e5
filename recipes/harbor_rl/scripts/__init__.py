"""Commands for datasets that Harbor has downloaded."""
