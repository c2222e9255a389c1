"""Apps whose model calls run before the app makes them.

`accelerate` is the entry point. `synthesizers` and `extractors` plan the parts of an app with
`plan_builder` and `prompt_inputs`. `scope` is one run of an app, `planned_run` its part on one
server, `report` its result; `scoped_generators` keep it open while a stream is read. Matching and
sending of calls is in `adapters/speculation`.
"""
