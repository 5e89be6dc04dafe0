"""Documents: files of a folder to text, text to chunks, and questions about them to the rows of a job. Torch-free."""
