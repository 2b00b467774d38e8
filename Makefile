PROTOS := $(wildcard proto/stageline_rpc/v1/*.proto)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: proto

proto:
	$(BIN)/python -m tests.proto_codegen proto
