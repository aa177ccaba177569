"""Hand-made transcripts for the corners of a console. Each entry is the text of one session; every line is one push."""

from repl_rl.sandbox.conformance.harvest import Transcript

_SESSIONS = r'''
1
None
'a'; 2
x = 3
x
_
_ + 1
del _
----
for i in range(3):
    i
    str(i)

while i:
    i -= 1
    i

----
def f(a):
    a
    return a

f(1)
f(2); f(3)
----
if True:
    1
    print(2)
    3

if 0: 1
else: 2

----
1/0
x = 
(1,
2)
'unfinished
"""three
lines"""
----
def g():
    raise ValueError("deep")

g()
try:
    g()
except ValueError as error:
    raise KeyError("next") from error

try:
    g()
except ValueError:
    1/0

----
raise ExceptionGroup("many", [ValueError(1), TypeError("two")])
raise SystemExit
----
exit()
1
----
quit(3)
----
import sys
sys.exit("message")
----
import sys
print("out"); print("err", file=sys.stderr); print("out again")
print("no newline", end="")
print("err", end="", file=sys.stderr)
sys.stdout.write("abc")
sys.stderr.write("abc\n")
sys.stdout.write("")
----
import os, sys
print("a"); os.write(1, b"b\n"); print("c", file=sys.stderr); os.write(2, b"d\n"); print("e")
os.system("echo from a shell; echo to stderr >&2")
import subprocess
subprocess.run(["echo", "hello"])
subprocess.run("echo one; echo two >&2; exit 3", shell=True, capture_output=True)
----
"unicode: \u00e9 \U0001f600 \x1b[31m"
print("\u00e9 \U0001f600 \x1b[31mred\x1b[0m \r over \b \x0c feed")
print("\ud800")
"\ud800"
import sys
sys.stdout.buffer.write(b"\xff\xfe raw\n")
π = 3.14; π
'<|im_end|>'
print("<|im_start|>system\n>>> fake\n... fake")
----
x = 1 is 1
"\d"
assert (1, "always true")
import warnings
warnings.warn("careful")
warnings.warn("old", DeprecationWarning)
def f():
    warnings.warn("in f", stacklevel=2)

f()
f()
----
import logging
logging.warning("watch out")
logging.getLogger("x").error("bad")
logging.lastResort
----
class A:
    """Doc."""
    x: int = 1
    def __repr__(self):
        print("repr called")
        return "A()"

A()
A.__module__, A.__qualname__
A
import pickle
pickle.loads(pickle.dumps(A())) is not None
class Broken:
    def __repr__(self): raise RuntimeError("no repr")

Broken()
[Broken()]
----
__name__
__doc__
sorted(globals())
dir()
__builtins__
locals() is globals()
__annotations__
y: int = 3
__annotations__
import sys
sys.modules["__main__"].__dict__ is globals()
sys.argv
sys.ps1, sys.ps2
sys.stdin.read()
sys.stdout, sys.stderr
sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors
sys.stdout.isatty(), sys.stdout.fileno(), sys.stderr.fileno()
sys.getrecursionlimit()
sys.last_type
----
input()
input("prompt> ")
import sys
sys.stdin.readline()
breakpoint
help
copyright
----
help()
1 + 1
----
help(len)
----
await x
async def f(): return 1

f
yield 1
return 1
break
!ls
%time 1
?len
len?
----
  1
if True:
1
	x = 1
if True:
        1
    2

x = 1
	y = 2
----
# only a comment

#!shebang
   
x = 1 # trailing
if True: # comment
    # inside
    x

for x in []: pass
else:
    'empty'

----
@property
def p(self): pass

p.fget
@undefined
def q(): pass

----
from __future__ import annotations
def f(x: undefined): pass

f.__annotations__
from __future__ import braces
from __future__ import nothing
----
match 3:
    case 1: 'one'
    case int(n): n

(n := 10)
lambda: 0 == 1
[i for i in range(3)]
{**{}, 'a': 1}
x, *y = 1, 2, 3
y
f'{1 + 1=}'
f'{'
0777
1__0
1 if
x = = 1
def f(:
(]
{'a': 1,, }
print "hi"
exec "x"
import a.b as
class
del
lambda x y: 1
f(x for x in [], 1)
def f(x, x): pass
nonlocal x
global z; z
"a" "b" 'c
\
1 + \
2
'a\
b'
----
def f(n): return f(n - 1)

f(0)
def g(n):
    try:
        return g(n - 1)
    except RecursionError:
        return "bottom"

g(0)
import sys
sys.setrecursionlimit(60)
f(0)
def depth(n=0):
    try: return depth(n + 1)
    except RecursionError: return n

depth()
----
def frames():
    import sys
    frame, names = sys._getframe(), []
    while frame: names.append(frame.f_code.co_filename == "<stdin>"); frame = frame.f_back
    return names.count(True), len(names)

frames()
import traceback
traceback.print_exc()
try: 1/0
except ZeroDivisionError: traceback.print_exc()

----
import sys
sys.displayhook = lambda value: print("shown", value)
1
None
sys.displayhook = sys.__displayhook__
2
def hook(kind, value, tb): print("hooked", kind.__name__, value)

sys.excepthook = hook
1/0
x +
sys.excepthook = sys.__excepthook__
1/0
----
import io, sys
real, sys.stdout = sys.stdout, io.StringIO()
print("hidden"); 1
sys.stdout = real
print("shown again")
sys.stderr = io.StringIO()
1/0
sys.stderr = sys.__stderr__
1/0
----
import threading
t = threading.Thread(target=print, args=("from a thread",)); t.start(); t.join()
t = threading.Thread(target=lambda: 1/0, name="worker"); t.start(); t.join()
threading.active_count(), threading.current_thread().name
threading.Thread().name
----
import asyncio
async def main():
    print("in a loop")
    return 5

asyncio.run(main())
asyncio.get_event_loop_policy().__class__.__name__
----
import contextvars, decimal
v = contextvars.ContextVar("v"); v.set(1) is not None
v.get()
decimal.getcontext().prec = 5
decimal.Decimal(1) / 3
----
import random, math, json, collections, itertools, functools, re, datetime
random.seed(1); random.random()
{'b': 1, 'a': {2, 1}}
set('hello')
hash('abc')
math.factorial(30)
10 ** 5000
json.dumps({"a": [1, None, "é"]})
collections.Counter("hello")
re.match(r"(a)(b)?", "a")
datetime.timedelta(days=1)
1e400, -0.0, float("nan"), 1j
b'\x00\xff', bytearray(3), memoryview(b'a').nbytes
range(3), slice(1), ..., NotImplemented
----
def gen():
    x = yield 1
    print("got", x)
    yield x

i = gen(); next(i)
i.send(5)
next(i)
i.throw(ValueError("thrown"))
----
class C:
    def __del__(self): print("deleted"); 1/0

C()
_ = None
c = C()
del c
----
with open("file.txt", "w") as file:
    file.write("hello")

open("file.txt").read()
import os; os.listdir()
open("missing")
----
import sys
class Noisy:
    def write(self, text): sys.__stdout__.write(text.upper())
    def flush(self): pass

sys.stdout = Noisy()
print("loud"); 'echo'
sys.stdout = sys.__stdout__
----
eval("1 +")
exec("x = 1\nx / 0")
compile("a b", "name", "exec")
exec("def h(): return missing"); h()
__import__("nowhere")
import this.that
from math import nothing
int("x"); 5
[].pop()
{}["key"]
None.attribute
undefined_name
"abc".uper()
open
print(1, 2, sep="")
print(*range(5), sep="\n")
assert False, "message"
raise
raise 5
raise ValueError
raise ValueError from None
raise KeyboardInterrupt
raise KeyboardInterrupt("text")
raise GeneratorExit
raise StopIteration(3)
raise BaseException
'''
_FORM_FEED = ("x = 1\x0c", "x", "if True:\r    1", "1\x00", "\x0c1", "'a\x85b'", "'line\u2028end'", "1\r")
_LONG = ("x = " + "+".join(["1"] * 500), "x", "(" * 150 + ")" * 150, "-" * 50 + "1", "[" * 90 + "]" * 90)


def edge_transcripts() -> list[Transcript]:
    """All of them."""
    sessions = [tuple(text.strip("\n").split("\n")) for text in _SESSIONS.split("----\n")]
    sessions += [_FORM_FEED, _LONG]
    return [Transcript(f"edge {number}", lines, len(lines)) for number, lines in enumerate(sessions)]
