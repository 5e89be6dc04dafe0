"""The report of a job, as one HTML page: what was recorded while it ran, charts of it, and the page itself."""
