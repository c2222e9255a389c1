"""The HTTP routes, one module per group of endpoints.

`dashboard` serves the pages at `/` and `/docs`. `programs`, `events`, `grammar`, `tokenize`,
`usage` and `health` hold Conure's own endpoints, `openai` and `parrot` the compatible APIs.
`middleware` assigns request ids and protects the loopback address, `problem` turns exceptions into
error responses, `request_context` gives access to body, tenant and service, and `openapi` builds
the OpenAPI document.
"""
