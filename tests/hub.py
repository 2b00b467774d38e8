"""A hub of models on loopback, whose large files are behind redirects to signed addresses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.range_server import Handler, RangeServer, Request

COMMIT = "a" * 40
TOKEN = "hf_averysecrettoken"
LARGE = (".safetensors", ".gguf")
SIGNATURE = "X-Signature=averysecretsignature"


class Hub:
    """The API of a hub, whose large files are on another server, behind signed addresses."""

    def __init__(self, files: Path, api: RangeServer, store: RangeServer) -> None:
        self.files, self.api, self.store = files, api, store
        self.num_expired = 0
        api.misbehave, store.misbehave = self._answer_api, self._answer_store

    def _answer_api(self, handler: Handler, request: Request) -> bool:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            handler.answer(401, {"X-Error-Code": "RepoNotFound"})
        elif "/resolve/" in request.path:
            name = request.path.split(f"/resolve/{COMMIT}/")[-1]
            if name.endswith(LARGE):
                handler.answer(302, {"Location": f"{self.store.url}/blobs/{name}?{SIGNATURE}"})
            else:
                request.end = (self.files / name).stat().st_size if not request.end else request.end
                return self._send(handler, request, name)
        elif request.path in ("/api/models/org/name", "/api/models/org/name/revision/main"):
            self._send_json(handler, self._model())
        else:
            handler.answer(404, {"X-Error-Code": "RevisionNotFound"})
        return True

    def _send(self, handler: Handler, request: Request, name: str) -> bool:
        begin, end = request.headers["range"].removeprefix("bytes=").split("-")
        request.begin, request.end = int(begin), int(end) + 1
        handler.begin_file(request, self.files / name, status=206)
        handler.send_range(request, self.files / name)
        return True

    def _send_json(self, handler: Handler, content: object) -> None:
        data = json.dumps(content).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _model(self) -> dict[str, object]:
        siblings = []
        for path in sorted(path for path in self.files.rglob("*") if path.is_file()):
            data = path.read_bytes()
            sibling: dict[str, object] = {
                "rfilename": str(path.relative_to(self.files)),
                "size": len(data),
                "blobId": hashlib.sha1(data).hexdigest(),
            }
            if path.suffix in LARGE:
                sha256 = hashlib.sha256(data).hexdigest()
                sibling["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
            siblings.append(sibling)
        return {"id": "org/name", "sha": COMMIT, "siblings": siblings, "private": False}

    def _answer_store(self, handler: Handler, request: Request) -> bool:
        assert "authorization" not in request.headers, "the token went to another host"
        if SIGNATURE not in handler.path or self.num_expired > 0:
            self.num_expired -= 1
            handler.answer(403, {})
            return True
        return self._send(handler, request, request.path.split("/blobs/")[-1])

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it the hub of this process, with a token for it."""
        monkeypatch.setattr(constants, "ENDPOINT", self.api.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
