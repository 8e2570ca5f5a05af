"""Writes src/driver/forward.rs: a forwarder for each driver function that cust refers to.

Usage: python3 forward.py > src/driver/forward.rs, in this folder. It reads the sources of cust and cust_raw that Cargo has fetched.
"""

import glob
import os
import re
import sys

CARGO = os.environ.get("CARGO_HOME", os.path.expanduser("~/.cargo"))


def source(crate):
    found = glob.glob(f"{CARGO}/registry/src/*/{crate}")
    if not found:
        sys.exit(f"{crate} isn't in {CARGO}/registry/src: run cargo fetch")
    return found[0]


def main():
    raw = open(f"{source('cust_raw-0.11.3')}/src/cuda.rs").read()
    declared = dict(re.findall(r"pub fn (cu\w+)\(([^;]*?)\)\s*->\s*CUresult;", raw, re.S))
    used = set()
    for path in glob.glob(f"{source('cust-0.3.2')}/src/**/*.rs", recursive=True):
        used |= set(re.findall(r"\bcu[A-Z]\w+", open(path).read()))
    names = sorted(used & set(declared) - {"cuGetErrorString"})
    print("// Written by forward.py from cust 0.3.2 and cust_raw 0.11.3.\n")
    print("forward! {")
    for name in names:
        arguments = re.sub(r"::std::os::raw::", "", " ".join(declared[name].split())).rstrip(", ")
        arguments = re.sub(r"::std::option::Option<", "Option<", arguments)
        print(f"    fn {name}({arguments});")
    print("}")


main()
