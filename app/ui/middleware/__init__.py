"""Request filtering in front of Gradio: hosts, origins, routes, body limits."""
