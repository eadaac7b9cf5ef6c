"""The pages of `mmspec demo`: plain and sped-up answers side by side, the rounds one by one, captions of many files.

What is done (`race`, `rounds`, `folder`) knows no gradio, and is tested without it; `page_*` and `site` only show it.
"""
