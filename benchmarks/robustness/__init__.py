"""How far the simulated ratios depend on what the paper leaves open.

`calibration` fits the cost model to figure 10, `headlines` lists the compared rows and the claims,
`cells` the scenarios, `results` runs and stores them, `memory` and `ablations` measure what single
mechanisms contribute, and `tables` writes Markdown.
"""
