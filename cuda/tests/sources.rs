//! What was generated is what its sources make.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const FLAGS: &str = "-x cuda --cuda-device-only --cuda-gpu-arch=sm_70 -nocudainc -nocudalib -S -O3 -std=c++17 -ffp-contract=off\n";

/// The check sum of POSIX `cksum`.
fn cksum(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: u8| {
        let shifted = crc ^ (u32::from(byte) << 24);
        (0..8).fold(shifted, |crc, _| if crc >> 31 == 1 { (crc << 1) ^ 0x04c1_1db7 } else { crc << 1 })
    };
    let mut crc = bytes.iter().fold(0, |crc, &byte| step(crc, byte));
    let mut length = bytes.len();
    while length > 0 {
        crc = step(crc, length as u8);
        length >>= 8;
    }
    !crc
}

fn kernels(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels").join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"))
}

#[test]
fn kernels_are_made_from_their_sources() {
    for name in ["optim", "ops"] {
        let source = kernels("device.h") + &kernels(&format!("{name}.cu")) + FLAGS;
        let sum = format!("flags: {} {}", cksum(source.as_bytes()), source.len());
        let ptx = kernels(&format!("{name}.ptx"));
        let first = ptx.lines().next().unwrap_or_default();
        assert!(
            first.ends_with(&sum),
            "{name}.ptx says `{first}`, its sources give `{sum}`: run scripts/ptx"
        );
    }
}

#[test]
fn the_check_sum_is_that_of_cksum() {
    // As coreutils says it.
    assert_eq!((cksum(b""), cksum(b"hello\n")), (4294967295, 3015617425));
}

/// Kernels of all rules are there, and the interpreter takes all.
#[test]
fn all_kernels_are_there() {
    let mut names: BTreeSet<String> = BTreeSet::new();
    for name in ["optim", "ops"] {
        names.extend(rankgrad_cuda_fake::kernels(&kernels(&format!("{name}.ptx"))).unwrap());
    }
    for kernel in rankgrad_cuda::rules::Kernel::ALL {
        for suffix in ["f32", "f64"] {
            let name = format!("{}_{suffix}", kernel.name());
            assert!(names.contains(&name), "{name}");
        }
    }
}

#[test]
fn arithmetic_that_could_round_otherwise_is_refused() {
    let ptx = kernels("optim.ptx");
    for (from, to) in [
        ("sqrt.rn.f32", "sqrt.approx.f32"),
        ("mul.rn.f64", "mul.f64"),
        ("ld.global.v4.f32", "ld.global.v2.f32"),
    ] {
        let error = rankgrad_cuda_fake::kernels(&ptx.replacen(from, to, 1)).unwrap_err();
        assert!(error.contains(to), "{error}");
    }
}

/// Each function of the driver that cust refers to is forwarded: the names are read from cust's sources.
#[test]
fn all_functions_that_cust_uses_are_forwarded() {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")));
    let sources = home
        .map(|home| home.join("registry/src"))
        .and_then(|folder| std::fs::read_dir(folder).ok());
    let mut folders = sources.into_iter().flatten().flatten().map(|entry| entry.path());
    let Some(folder) = folders.find(|folder| folder.join("cust-0.3.2").is_dir()) else {
        println!("skipped: Cargo keeps no sources of cust here");
        return;
    };
    let declared = std::fs::read_to_string(folder.join("cust_raw-0.11.3/src/cuda.rs")).unwrap();
    let declared: BTreeSet<&str> = declared
        .split("pub fn ")
        .skip(1)
        .filter_map(|rest| rest.split('(').next())
        .collect();
    let mut used = BTreeSet::new();
    let mut left = vec![folder.join("cust-0.3.2/src")];
    while let Some(path) = left.pop() {
        if path.is_dir() {
            left.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
        used.extend(words.filter(|word| declared.contains(word)).map(str::to_owned));
    }
    used.remove("cuGetErrorString");
    let forwarded: BTreeSet<String> = rankgrad_cuda::driver::FORWARDED.iter().map(|&name| name.into()).collect();
    assert_eq!(used, forwarded, "run cuda/forward.py");
}
