"""Persistence: from a program's events to the journal, to readers, and back after a restart.

outbox             writes records in order and publishes them once they are durable
event_stream       durable events and streamed text for readers
recovery           rebuilds programs from the journal; journaled_events decodes their events
resumption         resumes them, in slices; last those in whose turns an earlier process ended
program_directory  live and recently ended programs
journal_retention  deletes ended programs by age and size
"""
