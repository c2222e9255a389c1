"""Damage of the journal: found, named and survived.

`commit_log` records commits a second time, `integrity` checks a journal, `background_check` does so
while a server uses it, and `salvage` continues with what is left.
"""
