"""The dashboard at `/` and the API reference at `/docs`.

`files` loads the pages and their scripts; `static` contains them. The pages are plain HTML, CSS and
ES modules without a build step, and use the public HTTP API only.
"""
