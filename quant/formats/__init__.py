"""Weight formats: how a matrix becomes codes and scales, and back. `format` lists them and imports no torch."""
