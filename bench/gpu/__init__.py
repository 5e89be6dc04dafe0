"""What a GPU must show, part by part: bench/gpu.sh."""
