"""Aggregation of messages with a row of features for each stored entry."""
