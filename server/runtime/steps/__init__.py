"""Steps: the executors of nodes that run outside of engines.

expr_step       evaluates expressions
client_step     requests steps from the client; client_writes checks its answers
function_step   runs functions registered on the server
"""
