"""Pictures of a result file: an HTML page that needs nothing else, and PNGs for the README."""
