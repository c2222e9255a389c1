"""Requests, replies and retries of the client, without I/O.

records     requests, replies and the flows that yield and receive them
retry       how often, how soon and for how long a request is repeated
transfer    send one request until it gets a final reply
problems    the errors that replies describe
programs, procedures, models    the operations of the API
"""
