"""The OpenAI API: request and response bodies, chat templates, prompt hashing, the OpenAPI document, API keys."""
