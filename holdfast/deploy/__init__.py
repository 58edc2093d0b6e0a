"""A real federation: server, proxy and sites as processes of their own, over TLS.

Needs `pip install 'holdfast[deploy]'`."""
