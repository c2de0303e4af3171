"""Chat templates are rendered as `transformers` renders them, and cannot reach what they should not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from gateway.http.chat_template import BadTemplateError, ChatTemplate
from outrider.protocol.errors import InvalidArgumentError
from tests.gateway import tokenizers_for_tests

MESSAGES = [
    {"role": "system", "content": '  Be <brief> & "plain". '},
    {"role": "user", "content": "naïve?\n"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why"},
]
# What templates of well-known models are made of.
TEMPLATES = {
    "headers": """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
""",
    "namespace and loop controls": """
{% set ns = namespace(last=-1, found=false) %}
{% for message in messages[::-1] %}
  {% if message.role == 'assistant' %}
    {% set ns.last = messages | length - 1 - loop.index0 %}
    {% set ns.found = true %}
    {% break %}
  {% endif %}
{% endfor %}
{{ ns.last }} {{ ns.found }}
  {% for message in messages %}
    {% if loop.first %}{% continue %}{% endif %}
    [{{ loop.index }}] {{ message.content }}{{ eos_token }}
  {% endfor %}
{% if tools is none and documents is not defined %}none{% endif %}
""",
    "json": "{% for message in messages %}{{ message | tojson }}{{ message | tojson(indent=2) }}{% endfor %}"
    "{{ pad_token }}",
    "generation marks": """{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{% endgeneration %}
{% else %}{{ message.content }}{% endif %}{% endfor %}
""",
    "dates and dicts": "{{ strftime_now('%Y') }}{{ dict(a=1)['a'] }}{{ messages[0].get('name', 'nobody') }}",
}


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """With special tokens for templates to use."""
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizers_for_tests.byte_level(), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "named"])
async def test_as_transformers_renders_it(
    name: str, place: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Catches white space, escapes and variables that differ from what a model was trained on."""
    tokenizer.chat_template = TEMPLATES[name]
    tokenizer.save_pretrained(tmp_path, save_jinja_files=place == "chat_template.jinja")
    if place == "named":
        path = tmp_path / "tokenizer_config.json"
        config = json.loads(path.read_text())
        config["chat_template"] = [
            {"name": "tool_use", "template": "no"},
            {"name": "default", "template": TEMPLATES[name]},
        ]
        path.write_text(json.dumps(config))
    assert (tmp_path / "chat_template.jinja").exists() == (place == "chat_template.jinja")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert await template.render(MESSAGES, {}) == expected
    without = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert await template.render(MESSAGES, {}, begins_message=False) == without
    assert await template.render(MESSAGES, {"add_generation_prompt": False}) == without


@pytest.mark.parametrize("name", ["headers", "generation marks"])
@pytest.mark.parametrize("words", ["Once upon", " Once upon ", "Once\n", "on", ""])
async def test_a_message_is_continued_as_transformers_continues_it(
    name: str, words: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Catches an end of message, or white space, between a message's words and those that follow."""
    messages = [*MESSAGES, {"role": "assistant", "content": words}]
    tokenizer.chat_template = TEMPLATES[name]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>"})
    rendered = await template.render(messages, {}, begins_message=False, continues_message=True)
    assert rendered == expected
    assert rendered.rstrip().endswith(words.strip())


async def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(InvalidArgumentError, match=r"messages: .* leaves out the message"):
        await template.render(MESSAGES, {}, begins_message=False, continues_message=True)


async def test_a_long_conversation_is_rendered_too(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "x" * 20_000}]
    assert "x" * 20_000 in await ChatTemplate(TEMPLATES["headers"], {"bos_token": "<s>"}).render(messages, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[99].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(messages[0]) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
async def test_what_a_template_may_not_or_cannot_do_is_a_bad_request(source: str) -> None:
    with pytest.raises(InvalidArgumentError, match="messages: "):
        await ChatTemplate(source, {}).render(MESSAGES, {})


def test_a_model_without_a_template_or_with_a_broken_one(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% for %}"}')
    with pytest.raises(BadTemplateError, match="line 1"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(BadTemplateError, match="neither"):
        ChatTemplate.load(tmp_path)
    with pytest.raises(BadTemplateError, match="cannot be read"):
        ChatTemplate.load(tmp_path, tmp_path / "nowhere.jinja")
