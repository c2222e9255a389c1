"""Tests of the chat model."""
