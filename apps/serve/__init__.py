"""OpenAI's API over HTTP, answered by one engine: files, batches, chats, responses and completions."""
