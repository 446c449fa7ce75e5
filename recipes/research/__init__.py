"""Small studies of research questions: arms times seeds, a table, ``results.json``, a picture."""
