"""The engine core: contexts of one model, commands in, reports out.

- `engine`: applies commands, runs steps, returns reports.
- `context`, `generation`: state of one context and of one running Generate.
- `batch_scheduler`: chooses the tokens of a step.
- `lookahead`: plans the step that starts before the previous one is read.
- `output_processor`: turns sampled ids into text, stops and reports.
- `command_validation`: rejects commands that cannot be executed.
"""
