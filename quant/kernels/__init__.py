"""Triton kernels for matmuls with packed matrices. Import them lazily: `grouped`, `launch` and others need Triton."""
