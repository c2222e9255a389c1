"""The routes of the server, one file per dialect; each knows only `service` and HTTP."""
