"""Read model of one request's spans: time shares, waterfall rows, explanation. Pure."""
