"""Lists and searches of the open sessions."""

from __future__ import annotations


def _begin(caller, name: str | None = None, **metadata) -> str:
    answer = caller.post("create_session", display_name=name, user_metadata=metadata)
    return answer[1]["session_id"]


def _found(caller, **asked) -> list[str]:
    status, page = caller.post("sessions/search", **asked)
    assert status == 200, page
    return [one["session_id"] for one in page["sessions"]]


def test_sessions_are_listed_and_found_newest_first(caller, stories_model):
    mine = caller("ann")
    ids = [_begin(mine, f"Night run {i}", number=i) for i in range(5)]
    newest = ids[::-1]
    assert mine.get("sessions?limit=2&offset=1")[1]["sessions"] == newest[1:3]
    assert _found(mine) == newest
    assert _found(mine, display_name="run 3 night") == [ids[3]]
    assert _found(mine, session_id=ids[1]) == [ids[1]]
    assert _found(mine, session_id=ids[1], display_name="4") == [ids[4], ids[1]]
    assert _found(mine, user_metadata={"number": "2"}) == [ids[2]]
    assert _found(mine, statuses=[{"type": "failed"}]) == []
    assert _found(mine, statuses=[{"type": "failed"}, {"type": "active"}]) == newest
    assert _found(mine, owner={"type": "user", "owner_urns": ["tml:user:local"]}) == []
    assert _found(mine, owner={"type": "user", "owner_urns": ["tml:user:ann"]}) == newest
    assert _found(caller("local")) == []
    assert mine.post("sessions/search", project_ids=["p"])[0] == 400


def test_pages_follow_each_other_and_count_checkpoints(caller, stories_model):
    mine = caller("local")
    ids = [_begin(mine) for _ in range(3)]
    model = mine.model(stories_model, ids[0])
    mine.result(mine.post("save_weights", model_id=model, seq_id=1, path="a"))
    seen, cursor = [], None
    while True:
        page = mine.post("sessions/search", limit=1, cursor=cursor)[1]
        seen += page["sessions"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert [one["session_id"] for one in seen] == ids[::-1]
    assert [one["checkpoints_count"] for one in seen] == [0, 0, 1]
    assert seen[2]["checkpoint_storage_bytes"] > 1000
    assert {one["owner"] for one in seen} == {"tml:user:local"}
