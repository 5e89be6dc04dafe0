"""What a checkpoint is, from config.json and safetensors headers alone: no weight is read, torch is not imported."""
