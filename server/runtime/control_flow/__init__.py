"""Control flow: one executor module per node kind that decides which nodes run.

map, loop, if_, try_   nodes with bodies; bodies has what they share
wait, kill, yield_     nodes without bodies
"""
