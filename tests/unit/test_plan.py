"""Plans of what to warm: what they may say, and how errors name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cachewarmd import plan
from cachewarmd.errors import InvalidRequestError

EXAMPLES = Path(__file__).parents[2] / "examples" / "plans"


def _refusal(path: Path, content: str) -> str:
    path.write_text(content)
    with pytest.raises(InvalidRequestError) as caught:
        plan.load(path)
    return str(caught.value)


def test_the_examples_are_plans() -> None:
    """Each example loads, and says what it was written to say."""
    prompts = plan.load(EXAMPLES / "assistant.toml").prompts
    assert [prompt.name for prompt in prompts] == ["system-prompt", "manual", "warm-8k"]
    assert "about Example." in json.loads(prompts[0].chat.messages_json)[0]["content"]
    assert (prompts[0].pin, prompts[0].ttl_ms, prompts[0].urgency) == (True, 12 * 3600_000, 2)
    assert prompts[1].text.startswith("The manual of Example")
    assert (prompts[1].is_optional, prompts[1].deadline_ms) == (True, 600_000)
    assert (prompts[2].shape.length, prompts[2].shape.iterations) == (8192, 5)
    lines = plan.load(EXAMPLES / "prompts.jsonl").prompts
    assert [line.WhichOneof("prompt") for line in lines] == ["text", "text", "token_ids"]


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ('{"text": ""}', "text: a string that is not empty"),
        ('{"text": "a", "token_ids": [1]}', "found text and token_ids"),
        ('{"name": "x"}', "found none"),
        ('{"text": "a", "colour": 1}', "colour is not known; allowed are text"),
        ('{"text": "a", "urgency": "high"}', "'high': interactive, normal, background"),
        ('{"text": "a", "urgency": [1]}', "urgency: [1]"),
        ('{"text": "a", "pin": 1}', "pin: 1: true or false"),
        ('{"text": "a", "ttl": "1h"}', "only with pin"),
        ('{"text": "a", "deadline": "soon"}', "deadline: "),
        ('{"token_ids": [true]}', "whole numbers"),
        ('{"shape": 0}', "shape: 0: a whole number from 1"),
        ('{"text": "{{who}}"}', "variable 'who' is not known"),
        ("{", "one JSON object a line"),
        ("[" * 100_000, "plan.jsonl:2"),
        ("7", "a table"),
    ],
)
def test_an_error_names_the_line_and_what_is_allowed(tmp_path: Path, item: str, told: str) -> None:
    """What can't be an item is refused with file, line, value and what is allowed."""
    message = _refusal(tmp_path / "plan.jsonl", f'"fine"\n{item}\n')
    assert "plan.jsonl:2: " in message
    assert told in message


def test_toml_errors_name_item_and_table(tmp_path: Path) -> None:
    """In TOML the item's number, or the table, stands for the line."""
    path = tmp_path / "plan.toml"
    assert "plan.toml: item 2: " in _refusal(path, '[[items]]\ntext="a"\n[[items]]\nname="b"\n')
    assert "variables: " in _refusal(path, "[variables]\na=1\n")
    assert "defaults.text is not known" in _refusal(path, '[defaults]\ntext="a"\n')
    assert "at line 1" in _refusal(path, "= 1\n")


def test_files_are_read_below_the_root_only(tmp_path: Path) -> None:
    """No `..`, no absolute path and no link leads out of the plan's directory."""
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (inside / "sub" / "a.txt").write_text("content")
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "out").symlink_to(tmp_path)
    path = inside / "plan.jsonl"
    path.write_text('{"file": "sub/a.txt"}')
    assert plan.load(path).prompts[0].text == "content"
    for name in ("../secret", str(tmp_path / "secret"), "link", "out/secret", "missing", "sub"):
        assert repr(name) in _refusal(path, json.dumps({"file": name}))


def test_other_roots_are_used_instead(tmp_path: Path) -> None:
    """With roots, a file is looked for below them, in their order."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "b" / "t.txt").write_text("from b")
    path = tmp_path / "plan.jsonl"
    path.write_text('{"file": "t.txt"}')
    roots = [tmp_path / "a", tmp_path / "b"]
    assert plan.load(path, roots=roots).prompts[0].text == "from b"


def test_a_plan_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many items, or too many bytes, are refused."""
    monkeypatch.setattr(plan, "MAX_ITEMS", 2)
    assert "at most 2 items" in _refusal(tmp_path / "p.jsonl", '"a"\n"b"\n"c"\n')
    monkeypatch.setattr(plan, "MAX_PLAN_BYTES", 8)
    assert "8 bytes" in _refusal(tmp_path / "p.jsonl", '"abcdefghi"\n')
