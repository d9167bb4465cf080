"""Exported models, asked by onnxruntime."""

import numpy as np
import pytest


def require_files_of_clients(run, x, path):
    """The file of client h0, and the file without a client, answer as the run does for the first domain."""
    onnxruntime = pytest.importorskip("onnxruntime")
    for client in ("h0", None):
        run.export(path, client)
        session = onnxruntime.InferenceSession(path)
        found = session.run(None, {session.get_inputs()[0].name: x, "domain": np.zeros(len(x), np.int64)})[0]
        expected = run.predict_proba(x, domain=["d0"] * len(x), **({"client": [client] * len(x)} if client else {}))
        np.testing.assert_allclose(found, expected, atol=1e-5)
