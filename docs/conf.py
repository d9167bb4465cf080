"""How Sphinx makes the site from the pages of this folder: `make docs`."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for reference_tables
os.environ |= {"COLUMNS": "140", "TTY_COMPATIBLE": "0"}  # for commands in tutorials: wide lines, no moving bars

# In a notebook a command that fails is no error, so the kernels of tutorials are told that it is one.
os.environ["IPYTHONDIR"] = str(HERE / "_build" / "ipython")
COMMANDS_RAISE = """
def raising(command, run=get_ipython().system):
    run(command)
    if get_ipython().user_ns["_exit_code"]:
        raise RuntimeError(f"this command failed: {command}")

get_ipython().system = raising
"""
_STARTUP = Path(os.environ["IPYTHONDIR"], "profile_default", "startup")
_STARTUP.mkdir(parents=True, exist_ok=True)
(_STARTUP / "commands.py").write_text(COMMANDS_RAISE, encoding="utf-8")

_PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
project, version = _PROJECT["name"], _PROJECT["version"]
release = version
author = project_copyright = _PROJECT["authors"][0]["name"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "reference_tables"]
exclude_patterns = ["_build", "requirements.txt"]
nitpicky = True
suppress_warnings = ["myst.header"]  # parts of the README begin at the second level

# Anchors are those that GitHub makes, so that a link to one holds on both.
myst_heading_anchors = 4

# Tutorials are executed each time, and a cell or command that fails ends the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_in_temp = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # names and defaults say enough; types are for editors

html_theme = "furo"
html_title = f"feddar {version}"
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["static"]
html_favicon = "static/favicon.svg"
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
