"""Products with packed matrices in Triton. Import late: `grouped` and `launch` need Triton."""
