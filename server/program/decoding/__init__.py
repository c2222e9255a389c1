"""JSON as records.

`bodies` decodes the bodies of requests, with precise errors. `bounded_json` limits what an
untrusted text may cost. `typed_json` decodes and converts records in any thread. `invalid_part`
finds the part of a body that an error is about, and what would be allowed there.
"""
