"""The page that shows what the pipeline does, and the HTTP server that it comes from."""
