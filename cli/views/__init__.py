"""What is printed: plans, jobs, progress and findings as terminal text or as JSON events."""
