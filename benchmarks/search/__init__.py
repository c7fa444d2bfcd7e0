"""The plan that the search finds, compared with the best of all plans."""
