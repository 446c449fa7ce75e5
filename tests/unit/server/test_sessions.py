"""What a session lets go of while it is open."""

from __future__ import annotations

from types import SimpleNamespace

from tinker_cookbook.server.sessions import IDLE_SECONDS, KEPT_SAMPLERS, OpenSampler, Session


def test_old_snapshots_go_and_checkpoints_can_be_opened_again():
    session = Session("s", SimpleNamespace(name="ann"), SimpleNamespace())
    for i in range(KEPT_SAMPLERS + 4):
        path = None if i % 2 else f"tinker://r/sampler_weights/{i}"
        sampler = OpenSampler(str(i), SimpleNamespace(), "m", path, path is None, used_at=float(i))
        session.samplers[str(i)] = sampler
    session.put_away(now=IDLE_SECONDS + 1.5)  # 0 and 1 are idle for long enough
    assert session.samplers["0"].client is None
    assert "1" not in session.samplers
    assert all(session.samplers[str(i)].client is not None for i in range(2, KEPT_SAMPLERS + 4))
    session.put_away(now=10 * IDLE_SECONDS)
    opened = [i for i, one in session.samplers.items() if one.client is not None]
    assert opened == [str(i) for i in range(4, KEPT_SAMPLERS + 4)]
