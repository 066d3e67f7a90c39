"""The Python that the documentation shows compiles, and what it calls of qarl is there and takes those arguments."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest
from pages import IDS, PAGES, blocks

import qarl


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_block_of_python_fits_qarl(page: Path):
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qarl"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("qarl."):
                function = getattr(qarl, ast.unparse(node.func).removeprefix("qarl."))
                keywords = {str(keyword.arg): None for keyword in node.keywords}
                inspect.signature(function).bind(*node.args, **keywords)


def test_blocks_are_found_at_all():
    calls = [text.count("qarl.") for page in PAGES for text in blocks(page, "python")]
    assert sum(calls) >= 9
