"""What the compiled build may hold: modules that are there, without Structs, whose annotations mypyc does not keep."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hatch_build import COMPILED

SOURCES = Path(__file__).parent.parent / "src" / "kvroute"
MODULES = [f"{room}/{name}" for room, names in COMPILED.items() for name in names.split()]


@pytest.mark.parametrize("module", MODULES)
def test_a_compiled_module_holds_only_what_can_be_compiled(module: str) -> None:
    """No Struct, for msgspec would read `type` where a union stands, and nothing of numba's, which reads bytecode."""
    tree = ast.parse((SOURCES / f"{module}.py").read_text())
    bases = {ast.unparse(base) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases}
    imported = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for name in node.names
    }
    assert not bases & {"msgspec.Struct", "Struct"}
    assert "numba" not in imported
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            caught = {
                (handler.name, ast.unparse(handler.type))
                for handler in ast.walk(function)
                if isinstance(handler, ast.ExceptHandler) and handler.name and handler.type
            }
            assert len(caught) == len({name for name, _ in caught}), "the first kind caught is the name's only type"
    assert "vars" not in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}, "it has no __dict__"
