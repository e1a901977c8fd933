"""Small chat templates in the manner of model families, over the small model's <|im_start|> and <|im_end|>."""

SYSTEM = """{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}"""
OPENING = """{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
HERMES_CALLS = """{%- for call in message.tool_calls %}{{- '\\n' if message.content or not loop.first }}
    {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}{%- endfor %}"""
HERMES_RESULT = """{%- if message.role == 'tool' %}
    {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"""

# Results of one turn share a user message.
QWEN25 = SYSTEM + """{%- for message in messages %}""" + HERMES_RESULT + """{%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}""" + HERMES_CALLS + """{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}""" + OPENING

# The thinking of replies before the last question is dropped; enable_thinking=False opens every reply with an empty thought.
QWEN3 = SYSTEM + """{%- set last = namespace(question=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set last.question = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}""" + HERMES_RESULT + """{%- elif message.role == 'assistant' and loop.index0 < last.question %}
    {{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}""" + HERMES_CALLS + """{{- '<|im_end|>\\n' }}{%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}""" + HERMES_CALLS + """{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}
""" + OPENING + """{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""

# Thinking is dropped from every reply but the last.
FORGETFUL = SYSTEM + """{%- for message in messages %}""" + HERMES_RESULT + """{%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content if loop.last else message.content.split('</think>')[-1]) }}""" + HERMES_CALLS + """
    {{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}""" + OPENING

# Arguments must be text; after results the reply goes on without an opening of its own.
DEEPSEEK = """{%- set ns = namespace(is_tool=false) %}{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.is_tool = false %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'tool' %}
        {{- ('' if ns.is_tool else '<｜tool▁outputs▁begin｜>') + '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}{%- set ns.is_tool = true %}
    {%- else %}
        {{- ('<｜tool▁outputs▁end｜>' if ns.is_tool else '<｜Assistant｜>') + message.content }}{%- set ns.is_tool = false %}
        {%- for call in message.tool_calls %}
            {{- ('<｜tool▁calls▁begin｜>' if loop.first else '\\n') + '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
            {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
        {%- endfor %}{{- '<|im_end|>' }}
    {%- endif %}
{%- endfor %}{{- '<｜tool▁outputs▁end｜>' if ns.is_tool }}{{- '<｜Assistant｜>' if add_generation_prompt and not ns.is_tool }}"""

LLAMA3 = """{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}{%- for call in message.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "parameters": ' + (call.function.arguments | tojson) + '}' }}{%- endfor %}
    {%- else %}{{- message.content | trim }}{%- endif %}{{- '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# As Meta's own: one call in a message, or none.
LLAMA31 = LLAMA3.replace("{%- if message.tool_calls %}", "{%- if message.tool_calls and message.tool_calls | length != 1 %}"
                         "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- elif message.tool_calls %}")

MISTRAL = """{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) }}{%- endif %}{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}{%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}
        {{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + ', "id": "' + call.id + '"}' }}
        {{- '' if loop.last else ', ' }}{%- endfor %}{{- ']<|im_end|>' }}
    {%- else %}{{- ' ' + message.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"""

QWEN3_CODER = SYSTEM + """{%- for message in messages %}""" + HERMES_RESULT + """{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls %}{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
        {%- for key, value in call.function.arguments | items %}{{- '<parameter=' + key + '>\\n' + (value | string) + '\\n</parameter>\\n' }}{%- endfor %}
        {{- '</function>\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}""" + OPENING

NO_TOOL_ROLE = """{%- for message in messages %}{%- if message.role == 'tool' %}{{- raise_exception('roles must alternate') }}{%- endif %}
    {{- message.content + '<|im_end|>' }}{%- endfor %}"""
