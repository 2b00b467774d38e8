"""Internal protocol, version 1: between coordinator and workers. No client needs it."""
