"""What a job has done, on disk before it counts: append-only, checked record by record, whole again after any kill."""
