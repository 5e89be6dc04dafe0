"""The append-only record of a job, on disk before a row counts: checksummed by record, and intact after any kill."""
