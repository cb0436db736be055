"""Pickles that run code when plain pickle reads them, or make it fail, hang or take all memory."""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any

from tests.hecate_compile.checkpoints.tampering import CANARY, HERE, VARIABLE, Canary


def body(value: Any) -> bytes:
    """The opcodes that push a value; those of honest metadata, so that no other one is why it is refused."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=3)
    # Without a memo.
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()[2:-1]


def _text(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def named(module: str, name: str) -> bytes:
    """Protocol 4, which takes dotted names."""
    return _text(module) + _text(name) + b"\x93"


def _old_name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _call(module: str, name: str, *arguments: Any, old: bool = False) -> bytes:
    return (_old_name if old else named)(module, name) + body(arguments) + b"R"


def _code(expression: str) -> str:
    return f"__import__({HERE!r}, fromlist=['x']).run_canary({expression})"


def _shell() -> str:
    return f"touch {CANARY}"


# Each is the inside of a pickle, without PROTO and STOP. With plain pickle these do run.
RUNNING: dict[str, bytes] = {
    "os.system": _call("os", "system", _shell()),
    "posix.system": _call("posix", "system", _shell(), old=True),
    "os.putenv": _call("os", "environ.__setitem__", VARIABLE, "1"),
    "subprocess.run": _call("subprocess", "run", ["touch", str(CANARY)]),
    "subprocess.check_output": _call("subprocess", "check_output", ["touch", str(CANARY)]),
    "subprocess.Popen.wait": _call("subprocess", "call", ["touch", str(CANARY)]),
    "eval": _call("builtins", "eval", _code("1")),
    "exec": _call("builtins", "exec", _code("2")),
    "old name of exec": _call("__builtin__", "eval", _code("3"), old=True),
    "compile": named("builtins", "eval") + _call("builtins", "compile", _code("4"), "x", "eval") + b"\x85R",
    "getattr": named("builtins", "getattr") + _call("importlib", "import_module", HERE) + body("run_canary")
    + b"\x86R)R",
    "__import__": named("builtins", "getattr") + _call("builtins", "__import__", HERE) + body("__doc__") + b"\x86R0"
    + _call(HERE, "run_canary"),
    "map": named("builtins", "list") + named("builtins", "map") + named(HERE, "run_canary") + body([1])
    + b"\x86R\x85R",
    "functools.partial": named("functools", "partial") + named(HERE, "run_canary") + b"\x85R)R",
    "functools.reduce": named("functools", "reduce") + named(HERE, "run_canary") + body([1, 2]) + b"\x86R",
    "operator.methodcaller": _call("operator", "methodcaller", "append", "called") + named(HERE, "RAN") + b"\x85R",
    "operator.attrgetter": _call("operator", "attrgetter", "run_canary") + _call("importlib", "import_module", HERE)
    + b"\x85R)R",
    "operator.iadd": named("operator", "iadd") + named(HERE, "RAN") + body(["called"]) + b"\x86R",
    "a list elsewhere, APPEND": named(HERE, "RAN") + body("called") + b"a",
    "a list elsewhere, APPENDS": named(HERE, "RAN") + b"(" + body("called") + b"e",
    "a dict elsewhere, SETITEM": named("os", "environ") + body(VARIABLE) + body("1") + b"s",
    "a dict elsewhere, SETITEMS": named("os", "environ") + b"(" + body(VARIABLE) + body("1") + b"u",
    "pathlib": named("pathlib", "Path.write_text") + _call("pathlib", "PosixPath", str(CANARY)) + body("x")
    + b"\x86R",
    "open": _call("io", "open", str(CANARY), "w"),
    "codecs.open": _call("codecs", "open", str(CANARY), "w"),
    "sys.modules": _call("sys", "modules.__getitem__", HERE) + b"0" + _call(HERE, "RAN.append", "called"),
    "torch.os.system": _call("torch", "os.system", _shell()),
    "torch.serialization.os.system": _call("torch.serialization", "os.system", _shell()),
    "torch.storage.io.open": _call("torch.storage", "io.open", str(CANARY), "w"),
    "torch.distributed.checkpoint.metadata.os": _call(
        "torch.distributed.checkpoint.metadata", "os.system", _shell()
    ),
    "torch.builtins.eval": _call("torch", "builtins.eval", _code("5")),
    "nested pickle": _call("pickle", "loads", b"\x80\x04" + _call(HERE, "run_canary") + b"."),
    "nested pickle, in Python": _call("pickle", "_loads", b"\x80\x04" + _call(HERE, "run_canary") + b"."),
    "BUILD, __setstate__": named(HERE, "Canary") + b")\x81" + body({"a": 1}) + b"b",
    "BUILD, property": named(HERE, "Trap") + b")\x81" + body((None, {"trap": 1})) + b"b",
    "INST": f"(i{HERE}\nrun_canary\n".encode(),
    "OBJ": b"(" + named(HERE, "run_canary") + b"o",
    "NEWOBJ_EX": named(HERE, "Canary") + b")}\x92" + body(1) + b"b",
    "EXT1": b"\x82\xf0" + b")R",
    "EXT2": b"\x83\xf0\xf0" + b")R",
    "EXT4": b"\x84\xf0\xf0\xf0\x00" + b")R",
    "__reduce_ex__": pickle.dumps(Canary(), protocol=4)[2:-1],
    "__reduce__, protocol 0": pickle.dumps(Canary(), protocol=0)[:-1],
    "timeit": _call("timeit", "repeat", _code("6"), "pass", 1, 1)[:-1] + b"0" + _call(HERE, "run_canary"),
    "InteractiveInterpreter": named("code", "InteractiveInterpreter.runsource") + b"("
    + _call("code", "InteractiveInterpreter") + body(_code("7")) + b"tR",
}  # fmt: skip

# Of these plain pickle runs something too, or fails, hangs or takes all memory.
DEEP = 20_000
TUPLES = b")\x85" + b"2\x86" * 200
OTHERS: dict[str, bytes] = {
    "torch.load": _call("torch", "load", "/dev/zero"),
    "torch.hub.load": _call("torch", "hub.load", "a/b", "c"),
    "torch.hub": named("torch", "hub"),
    "torch.jit.load": _call("torch", "jit.load", "/dev/null"),
    "torch.ops.load_library": _call("torch", "ops.load_library", "/tmp/x.so"),
    "torch.classes.load_library": _call("torch", "classes.load_library", "/tmp/x.so"),
    "torch.storage._load_from_bytes": _call("torch.storage", "_load_from_bytes", b"x"),
    "torch._utils._rebuild_parameter": named("torch._utils", "_rebuild_parameter"),
    "torch.utils.cpp_extension.load": named("torch.utils.cpp_extension", "load"),
    "torch._dynamo": named("torch", "_dynamo"),
    "a dtype by another name": named("torch", "float32.__class__"),
    "a dtype's methods": named("torch", "float32.__reduce__"),
    "a dtype that is called": named("torch", "float32") + b")R",
    "hecate's own imports": _call("hecate.checkpoints.publish", "shutil.rmtree", "/nowhere"),
    "hecate.load": _call("hecate", "load", "/nowhere"),
    "importlib.reload": named("importlib", "reload"),
    "SourceFileLoader": _call("importlib.machinery", "SourceFileLoader", "x", "/tmp/x.py"),
    "ctypes": _call("ctypes", "CDLL", "/nowhere.so"),
    "marshal": _call("marshal", "loads", b"N"),
    "types.FunctionType": named("types", "FunctionType"),
    "shutil.rmtree": _call("shutil", "rmtree", "/nowhere"),
    "os.remove": _call("os", "remove", "/nowhere"),
    "pty.spawn": named("pty", "spawn"),
    "webbrowser.open": named("webbrowser", "open"),
    "numpy.load": _call("numpy", "load", "/dev/null", None, True),
    "numpy reconstruct": named("numpy._core.multiarray", "_reconstruct"),
    "numpy.core": named("numpy.core.multiarray", "_reconstruct"),
    "codecs.encode": _call("_codecs", "encode", "x", "rot13"),
    "OrderedDict": _call("collections", "OrderedDict"),
    "defaultdict": named("collections", "defaultdict") + named("os", "system") + b"\x85R",
    "copyreg._reconstructor": _call("copyreg", "_reconstructor"),
    "sys.modules": named("sys", "modules"),
    "an empty module": named("", "system"),
    "an empty name": named("os", ""),
    "dots": named("os", "..system"),
    "names that are no texts": b"K\x01K\x02\x93",
    "persistent id": body("x") + b"Q",
    "persistent id as text": b"Px\n",
    "STRING": b"S'x'\n",
    "UNICODE": b"Vx\n",
    "INT": b"I1\n",
    "FLOAT": b"F1\n",
    "BINFLOAT": b"G" + bytes(8),
    "a set": b"\x8f",
    "a frozenset": b"(K\x01\x91",
    "POP": b"N0N",
    "POP_MARK": b"(N1N",
    "DUP": b"N2\x86",
    "EXT of nobody": b"\x82\x01",
    "a memo of 16 GiB": b"Nr\xff\xff\xff\x7f",
    "a memo of nothing": b"j\xff\xff\xff\x0f",
    "a memo of nothing, the last": b"j\xff\xff\xff\xff",
    "a text of 4 GiB": b"X\xff\xff\xff\xff",
    "a text of 2**63": b"\x8d" + struct.pack("<Q", 2**63 - 1),
    "bytes of 2**62": b"\x8e" + struct.pack("<Q", 2**62),
    "a bytearray of 2**40": b"\x96" + struct.pack("<Q", 2**40),
    "a frame of 2**62": b"\x95" + struct.pack("<Q", 2**62) + b"N",
    "a frame of 2**64": b"\x95" + b"\xff" * 8 + b"N",
    "a frame in a frame": b"\x95" + struct.pack("<Q", 20) + b"\x95" + struct.pack("<Q", 20) + b"N",
    "a long of 2 GiB": b"\x8b" + struct.pack("<i", 2**31 - 1),
    "a long of less than nothing": b"\x8b" + struct.pack("<i", -1),
    "out of band buffers": b"\x97",
    "deep tuples": b")" + b"\x85" * DEEP,
    "deep lists": b"]" * DEEP + b"a" * (DEEP - 1),
    "deep dicts": b"}N" * DEEP + b"}" + b"s" * DEEP,
    "deep marks": b"(" * DEEP,
    "a key that takes for ever to hash": b"}" + TUPLES + b"Ns",
    "the same without DUP": b"})\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60)) + b"Ns",
    "the same, SETITEMS": b"}()\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(60)) + b"Nu",
    "the same in a size": named("torch", "Size") + b")\x94"
    + b"".join(b"h%ch%c\x86\x94" % (n + 2, n + 2) for n in range(60)) + b"\x85R",
    "a list in itself": b"]\x94h\x00a",
    "a size of texts": named("torch", "Size") + body((("a",),)) + b"R",
    "a size of 10,000 dimensions": named("torch", "Size") + body(((1,) * 10_000,)) + b"R",
    "a size of an iterator": named("torch", "Size") + body(([1],)) + b"R",
    "a size without arguments": named("torch", "Size") + b")R",
    "a class as a value": named("torch", "Size") + b")\x81",
    "NEWOBJ of a function": named("torch.serialization", "_get_layout") + b")\x81",
    "NEWOBJ with arguments": named("torch.distributed.checkpoint.metadata", "MetadataIndex") + b"(Nt\x81",
    "REDUCE of a class": named("torch.distributed.checkpoint.metadata", "BytesStorageMetadata") + b")R",
    "REDUCE of a class, with an argument": _call("torch.distributed.checkpoint.metadata", "MetadataIndex", "x"),
    "REDUCE of a text": body("x") + b")R",
    "another layout": _call("torch.serialization", "_get_layout", "torch.sparse_coo"),
    "no layout": _call("torch.serialization", "_get_layout", ["torch.strided"]),
    "no memory format": _call("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", 99),
    "BUILD of a class": named("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata")
    + body((None, {"sizes": 1})) + b"b",
    "BUILD of a class, as a dict": named("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata")
    + body({"sizes": 1}) + b"b",
    "BUILD of an enumeration": _call("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", 0)
    + body({"_value_": 99, "_name_": "X"}) + b"b",
    "BUILD of a function": named("torch.serialization", "_get_layout") + body((None, {"__doc__": "x"})) + b"b",
    "BUILD of a dtype": named("torch", "float32") + body({"x": 1}) + b"b",
    "BUILD of other fields": named("torch.distributed.checkpoint.metadata", "MetadataIndex") + b")\x81"
    + body({"__class__": 1}) + b"b",
    "BUILD with slots": named("torch.distributed.checkpoint.metadata", "MetadataIndex") + b")\x81"
    + body((None, {"fqn": "x"})) + b"b",
    "BUILD of properties": named("torch.distributed.checkpoint.metadata", "TensorProperties") + b")\x81"
    + body(("a", "b")) + b"b",
    "an unknown opcode": b"\xff",
    "nothing on the stack": b"R",
    "no mark": b"t",
    "no end": b"N" * 3 + b"\x95",
    "None": b"N",
    "a dict": b"}",
    "Metadata of nothing": named("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81",
    "bytes that are no opcodes": bytes(range(256)),
}  # fmt: skip
