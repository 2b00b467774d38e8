"""OpenAI's Responses API: `/v1/responses`. A response is a request that the coordinator keeps."""
