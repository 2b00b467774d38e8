"""HTTP server and web page of the dashboard."""
