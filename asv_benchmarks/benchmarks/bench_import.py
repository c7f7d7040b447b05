"""What importing the package costs."""


def timeraw_import_kalos_ctx():
    """A fresh interpreter that imports the package."""
    return "import kalos_ctx"


def timeraw_import_session_store():
    """The same, with the store loaded."""
    return "from kalos_ctx import SessionStore"
