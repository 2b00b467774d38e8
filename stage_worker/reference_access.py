"""Who may ask what this worker's checkpoint answers, and of which checkpoint."""

from stageline_rpc.v1 import cluster_pb2
from wire.errors import HandshakeMismatch
from wire.peer_secrets import RefusedPeers, is_secret


class ReferenceAccess:
    """What the coordinator said in its last Welcome. Until then nobody may ask anything."""

    def __init__(self, refused: RefusedPeers) -> None:
        self._refused = refused
        self._model = cluster_pb2.ModelRef()
        self._secret = b""

    def grant(self, welcome: cluster_pb2.Welcome) -> None:
        """The coordinator that the worker has joined may ask, about the model that it serves."""
        self._model, self._secret = welcome.model, welcome.reference_secret

    def check(self, secret: bytes, *, fingerprint: str, host: str) -> str:
        """The directory of the served checkpoint, as in ModelRef. Raises SecretMismatch for everyone but the
        coordinator, HandshakeMismatch for another checkpoint. `host` is the caller's.
        """
        if not is_secret(secret, self._secret):
            raise self._refused.secret_mismatch("ComputeReference", "reference secret", host=host)
        if fingerprint != self._model.fingerprint:
            raise HandshakeMismatch("fingerprint", expected=self._model.fingerprint, got=fingerprint)
        return self._model.directory
