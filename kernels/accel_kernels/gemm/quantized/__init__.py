"""Products with weights in fewer bits."""
