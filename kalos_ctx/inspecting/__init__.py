"""A local page that shows a store's sessions, their windows, and why they are as they are.

`server` answers a browser on this machine, `pages` turns a store into the documents that it asks
for, and `page/` holds what the browser runs.
"""
