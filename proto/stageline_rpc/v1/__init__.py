"""Public protocol, version 1: for clients, operators, dashboards and routers."""
