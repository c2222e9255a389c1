"""The LangChain chat model.

model              `ChatConure`, its blocking and awaited methods
settings           the arguments of `ChatConure`
model_info         what a model can do
model_call         the program of one call
call_options       from LangChain's call arguments to node fields
messages           from messages to JSON and back; json_values does this for other values
answer_chunks      from answers to chunks and results
sessions           infers sessions from message histories
structured_output  `with_structured_output`
"""
