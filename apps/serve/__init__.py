"""OpenAI's API over HTTP, answered by one engine: files, batches, chats and completions."""
