"""Whole programs and single requests on simulated engines with little memory, under any order.

The engine works in steps as the real one does, so its number of steps is that of the real engine;
see `simulation.stepwise_engine`.
"""
