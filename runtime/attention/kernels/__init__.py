"""Paged attention in Triton. Import late: `paged` and `storing` need Triton, the other files do not."""
