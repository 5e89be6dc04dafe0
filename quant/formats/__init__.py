"""Weight formats: the dtypes, the layout of each format in bytes, and the code that packs and unpacks it."""
