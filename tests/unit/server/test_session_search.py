"""Lists and searches of the open sessions."""

from __future__ import annotations


def _begin(caller, name: str | None = None, **metadata) -> str:
    answer = caller.post("create_session", display_name=name, user_metadata=metadata)
    return answer[1]["session_id"]


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
