"""Describes a checkpoint from config.json and safetensors headers: reads no weights and imports no torch."""
