"""Shortened chat templates of real models; each treats assistant messages differently."""

PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = (  # Qwen2
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe good.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (  # Qwen3: thoughts of earlier turns are dropped, the last turn's are moved to the front
    "{%- set ns = namespace(last=messages|length - 1, open=true) %}"
    "{%- for m in messages[::-1] %}{%- if ns.open and m.role == 'user' %}{%- set ns.open = false %}"
    "{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set content = m.content or '' %}{%- if m.role == 'assistant' %}"
    "{%- set thought = '' %}{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- content }}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
DATED = (  # Llama 3.2: the date, and every message trimmed
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y %H:%M:%S %f') %}"
    "{% endif %}<|system|>Today is {{ date_string }}.<|eot|>"
    "{% for m in messages %}<|{{ m['role'] }}|>\n\n{{ (m['content'] or '') | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n\n{% endif %}"
)
ANSWERS = (  # DeepSeek R1: of every assistant message the answer alone
    "{% for m in messages %}{% set content = m['content'] or '' %}"
    "{% if m['role'] == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}<{{ m['role'] }}>{{ content }}</{{ m['role'] }}>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HEADERS = {  # of an assistant turn
    "plain": (PLAIN, "<|assistant|>"),
    "chatml": (CHATML, "<|im_start|>assistant"),
    "thinking": (THINKING, "<|im_start|>assistant"),
    "dated": (DATED, "<|assistant|>"),
    "answers": (ANSWERS, "<assistant>"),
}
