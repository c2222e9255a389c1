"""How far the simulated ratios depend on what the paper leaves open.

`calibration` fits the cost model to figure 10, `headlines` lists the compared rows and the claims,
`cells` the scenarios, `results` runs and stores them, `memory` and `ablations` measure what single
mechanisms contribute, `fairness` who ends later, and `tables` writes Markdown. `counterfactual`
measures the estimate of receipts on a server.
"""
