"""The user's own files: tables, arrays and folders of pictures."""
