"""The documentation site: `python -m sphinx -W docs build/docs`. Nothing is fetched, to build it or to read it."""

from __future__ import annotations

import contextlib
import io
import os
import re
from importlib.metadata import version as installed

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from memra_pp import cli

project = "memra_pp"
version = release = installed("memra-pp")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "memra_pp"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False

default_role = "py:obj"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

os.environ["COLUMNS"] = "100"


def help_of(*command: str) -> nodes.literal_block:
    """What `memra-pp COMMAND --help` prints, out of the parser itself."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main([*command, "--help"])
    return nodes.literal_block(printed.getvalue(), printed.getvalue(), language="text")


class CommandHelp(SphinxDirective):
    """The help of the command, and a section for each of its own commands."""

    def run(self) -> list[nodes.Node]:
        overview = help_of()
        names = re.findall(r"^    (\w+)", overview.rawsource, re.MULTILINE)
        sections = [nodes.section("", nodes.title("", name), help_of(name), ids=[name], names=[name]) for name in names]
        return [overview, *sections]


def setup(app: Sphinx) -> None:
    """Registers what these pages add to Sphinx."""
    app.add_directive("command-help", CommandHelp)
