"""Recurrent layers: transformers' mixers over packed passes, with states of their own for every sequence."""
