"""ASGI middleware in front of Gradio: hosts, origins, routes, and limits of request bodies."""
