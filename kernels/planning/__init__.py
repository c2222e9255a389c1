"""The attention plan of a step: which queries read which KV blocks together.

plan         the plan and its work items, built from block tables
planner      plans step after step, reusing the plan of an unchanged batch
prefix_tree  finds the ranges of blocks that rows share, and decides which to share
"""
