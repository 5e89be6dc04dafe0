"""Decoder layers of a known structure whose small operations and products the library of CPU kernels runs together."""
