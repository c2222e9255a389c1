"""The five programs of the essay "LLM Decoder DSL", with line breaks restored and `xxxx` filled in.

`gen_input` and `gen_input2`, which the essay leaves out, are written as functions of the language.
"""

from __future__ import annotations

import re

TEMPLATE = """\
User: 你好<|im_end|>Assistant: 你好<|im_end|>
User: {{question}}<|im_end|>Assistant: {{name=Answer, end=<|im_end|>}}
System: 上述Assistant的回答是否违反了规定?<|im_end|>Critic: \
{{name=CriticResult, value=['Yes', 'No'], end=<|im_end|>}}
System: 用户接下来可能会有哪些问题?<|im_end|>Copilot: \
{{name=SuggestQuestionList, type=list, end=<|im_end|>}}
"""

CRITIC = """\
message_list = [{'role': 'user', 'context': 'HISTORY'}, {'role': 'assistant', 'context': 'Hello.'},
                {'role': 'user', 'context': 'What is tea?'},]
answer_message = llm_chat(model_name, message_list, temperature=0.7)
message_list2 = message_list + [answer_message ]
yield { 'answer': answer_message }
StartNewJob: # 相当于启动了一个新线程进行执行
    critic_message_list = message_list2 + [{'role': 'system', 'context': '是否违反规定?'}]
    critic_result = llm_chat(model_name, critic_message_list, result_value=['Yes', 'No'])
    yield { 'critic': critic_result }
StartNewJob:
    copilot_message_list = message_list2 + [{'role': 'system', 'context': 'What is next?'}]
    copilot_result = llm_chat(model_name, copilot_message_list, result_type=list)
    yield { 'copilot': copilot_result }
# 返回结果
# LLM API会返回3条消息
# 第1条是 answer 的结果
# 第2,3条 是 critic 和 copilot 的结果,顺序不确定
"""

STREAM = """\
message_list = [{'role': 'user', 'context': 'Write about tea.'}]
result_stream = llm_chat(model_name, message_list, stream=True)
result_buffer = ''
for chunk in result_stream:
    result_buffer += chunk
    yield { 'field1': {'content': result_buffer, 'is_end': False }}
yield { 'field1': {'content': result_buffer, 'is_end': True }}
"""

FEATURES = """\
def gen_input(message_list, feature1, feature2):
    return message_list + [{'role': 'system', 'context': f'{feature1}; {feature2}'}]

message_list = [{'role': 'user', 'context': 'Hi'},{'role': 'assistant', 'context': 'Hello'},
                {'role': 'user', 'context': 'A long question'},]
StartNewJob: # 提取特征1
    feature1_message_list = message_list + [{'role': 'system', 'context': 'Feature 1?'}]
    feature1_result = llm_chat(model_name, feature1_message_list)['context']
    yield { 'feature1': feature1_result }
StartNewJob: # 提取特征2
    # RAG等非纯粹LLM的调用也可以封装在DSL内
    feature2_result = rag(model_name, message_list)['context']
    yield { 'feature2': feature2_result }
# 从语义上也可以省略显示声明wait
wait feature1_result, feature2_result
# 省略细节
message_list3 = gen_input(message_list, feature1_result, feature2_result)
result = llm_chat(model_name, message_list3)
yield { 'result': RESULT }
"""

SPECULATION = """\
def gen_input2(message_list, feature2):
    return message_list + [system(f'Use this: {feature2}')]

message_list = [{'role': 'user', 'context': 'QUESTION'}]
StartNewJob: # 默认的处理逻辑
    default_result = llm_chat(model_name, message_list)
    yield { 'default': default_result }
StartNewJob: # 提取特征1
    feature1_message_list = message_list + [{'role': 'system', 'context': 'Feature 1?'}]
    feature1_result = llm_chat(model_name, feature1_message_list)['context']
    yield { 'feature1': feature1_result }
StartNewJob: # 提取特征2
    feature2_message_list = message_list + [{'role': 'system', 'context': 'Feature 2?'}]
    # RAG等非纯粹LLM的调用也可以封装在DSL内
    feature2_result = rag(model_name, feature2_message_list)['context']
    yield { 'feature2': feature2_result }
StartNewJob:
    wait feature1_result
    if feature1_result.contains('xxxx'):
        yield { 'feat1_found': 1 }
        default_result.kill()
        wait feature2_result
        message_list2 = gen_input2(message_list, feature2_result) # 为了篇幅这里省略
        final_result = llm_chat(model_name, message_list2 )
        yield {'result2': final_result }
    else:
        feature2_result.kill()
        final_result = default_result
wait final_result
yield { 'final': final_result }
"""


def bounded(source: str, max_tokens: int) -> str:
    """Return a program whose calls with a free text have a limit, for a model without an end."""
    call = r"(llm_chat\(model_name, \w+)(?=\)|, temperature|, stream)"
    return re.sub(call, rf"\1, max_tokens={max_tokens}", source)
