//! What each instruction computes: functions over the bits of registers.
//!
//! Instructions of floats must say `.rn`: others may be fused or approximated, and then a GPU gives other bits than the CPU.

/// A function of one, two or three registers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Function {
    One(fn(u64) -> u64),
    Two(fn(u64, u64) -> u64),
    Three(fn(u64, u64, u64) -> u64),
}
use Function::{One, Three, Two};

fn f32_of(x: u64) -> f32 {
    f32::from_bits(x as u32)
}
fn f64_of(x: u64) -> f64 {
    f64::from_bits(x)
}
fn of_f32(x: f32) -> u64 {
    u64::from(x.to_bits())
}
fn of_f64(x: f64) -> u64 {
    x.to_bits()
}

/// Two operands of a type, and a result of it.
macro_rules! ints {
    ($kind:expr, |$a:ident, $b:ident| $body:expr) => {
        match $kind {
            "u16" | "b16" => Two(|a, b| {
                let ($a, $b) = (a as u16, b as u16);
                u64::from($body as u16)
            }),
            "s16" => Two(|a, b| {
                let ($a, $b) = (a as i16, b as i16);
                u64::from($body as i16 as u16)
            }),
            "u32" | "b32" => Two(|a, b| {
                let ($a, $b) = (a as u32, b as u32);
                u64::from($body as u32)
            }),
            "s32" => Two(|a, b| {
                let ($a, $b) = (a as i32, b as i32);
                u64::from($body as i32 as u32)
            }),
            "u64" | "b64" => Two(|a, b| {
                let ($a, $b) = (a, b);
                $body as u64
            }),
            "s64" => Two(|a, b| {
                let ($a, $b) = (a as i64, b as i64);
                $body as i64 as u64
            }),
            _ => return None,
        }
    };
}

macro_rules! floats {
    ($kind:expr, |$a:ident, $b:ident| $body:expr) => {
        match $kind {
            "f32" => Two(|a, b| {
                let ($a, $b) = (f32_of(a), f32_of(b));
                of_f32($body)
            }),
            "f64" => Two(|a, b| {
                let ($a, $b) = (f64_of(a), f64_of(b));
                of_f64($body)
            }),
            _ => return None,
        }
    };
}

macro_rules! compares {
    ($kind:expr, |$a:ident, $b:ident| $body:expr) => {
        match $kind {
            "u16" | "b16" => Two(|a, b| {
                let ($a, $b) = (a as u16, b as u16);
                u64::from($body)
            }),
            "s16" => Two(|a, b| {
                let ($a, $b) = (a as i16, b as i16);
                u64::from($body)
            }),
            "u32" | "b32" => Two(|a, b| {
                let ($a, $b) = (a as u32, b as u32);
                u64::from($body)
            }),
            "s32" => Two(|a, b| {
                let ($a, $b) = (a as i32, b as i32);
                u64::from($body)
            }),
            "u64" | "b64" => Two(|a, b| {
                let ($a, $b) = (a, b);
                u64::from($body)
            }),
            "s64" => Two(|a, b| {
                let ($a, $b) = (a as i64, b as i64);
                u64::from($body)
            }),
            "f32" => Two(|a, b| {
                let ($a, $b) = (f32_of(a), f32_of(b));
                u64::from($body)
            }),
            "f64" => Two(|a, b| {
                let ($a, $b) = (f64_of(a), f64_of(b));
                u64::from($body)
            }),
            _ => return None,
        }
    };
}

/// Comparisons that hold too when a number is missing.
macro_rules! unordered {
    ($kind:expr, |$a:ident, $b:ident| $body:expr) => {
        match $kind {
            "f32" => Two(|a, b| {
                let ($a, $b) = (f32_of(a), f32_of(b));
                u64::from($body)
            }),
            "f64" => Two(|a, b| {
                let ($a, $b) = (f64_of(a), f64_of(b));
                u64::from($body)
            }),
            _ => return None,
        }
    };
}

/// What `op` computes.
pub(crate) fn function(op: &str) -> Result<Function, String> {
    let parts: Vec<&str> = op.split('.').collect();
    let kind = parts[parts.len() - 1];
    let is_float = kind == "f32" || kind == "f64";
    let rounds = matches!(parts[0], "add" | "sub" | "mul" | "div" | "sqrt" | "rcp" | "fma" | "mad");
    if parts.contains(&"approx") || parts.contains(&"ftz") || (is_float && rounds && !parts.contains(&"rn")) {
        return Err("rounds otherwise than IEEE 754 says; build with contraction off".into());
    }
    find(&parts, kind, is_float).ok_or_else(|| "an instruction that isn't known".into())
}

#[allow(
    clippy::double_comparisons,
    clippy::neg_cmp_op_on_partial_ord,
    reason = "each is written as PTX defines it, with its answer for NaN"
)]
fn find(parts: &[&str], kind: &str, is_float: bool) -> Option<Function> {
    Some(match (parts[0], is_float) {
        ("add", true) => floats!(kind, |a, b| a + b),
        ("sub", true) => floats!(kind, |a, b| a - b),
        ("mul", true) => floats!(kind, |a, b| a * b),
        ("div", true) => floats!(kind, |a, b| a / b),
        ("max", true) => floats!(kind, |a, b| a.max(b)),
        ("min", true) => floats!(kind, |a, b| a.min(b)),
        ("copysign", true) => floats!(kind, |a, b| b.copysign(a)),
        ("add", false) => ints!(kind, |a, b| a.wrapping_add(b)),
        ("sub", false) => ints!(kind, |a, b| a.wrapping_sub(b)),
        ("div", false) => ints!(kind, |a, b| a.checked_div(b).unwrap_or(0)),
        ("rem", false) => ints!(kind, |a, b| a.checked_rem(b).unwrap_or(0)),
        ("min", false) => ints!(kind, |a, b| a.min(b)),
        ("max", false) => ints!(kind, |a, b| a.max(b)),
        ("mul", false) if parts[1] == "lo" => ints!(kind, |a, b| a.wrapping_mul(b)),
        ("mul", false) if parts[1] == "hi" => match kind {
            "u32" => Two(|a, b| u64::from(((u64::from(a as u32) * u64::from(b as u32)) >> 32) as u32)),
            "u64" => Two(|a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64),
            "s64" => Two(|a, b| ((i128::from(a as i64) * i128::from(b as i64)) >> 64) as u64),
            _ => return None,
        },
        ("mul", false) if parts[1] == "wide" => match kind {
            "u16" => Two(|a, b| u64::from(u32::from(a as u16) * u32::from(b as u16))),
            "u32" => Two(|a, b| u64::from(a as u32) * u64::from(b as u32)),
            "s32" => Two(|a, b| (i64::from(a as i32) * i64::from(b as i32)) as u64),
            _ => return None,
        },
        ("mad", false) if parts[1] == "lo" => match kind {
            "s32" | "u32" => Three(|a, b, c| u64::from((a as u32).wrapping_mul(b as u32).wrapping_add(c as u32))),
            "s64" | "u64" => Three(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
            _ => return None,
        },
        ("and" | "or" | "xor", false) if kind == "pred" => match parts[0] {
            "and" => Two(|a, b| a & b),
            "or" => Two(|a, b| a | b),
            _ => Two(|a, b| a ^ b),
        },
        ("not", false) if kind == "pred" => One(|a| a ^ 1),
        ("and", false) => ints!(kind, |a, b| a & b),
        ("or", false) => ints!(kind, |a, b| a | b),
        ("xor", false) => ints!(kind, |a, b| a ^ b),
        ("shl", false) => match kind {
            "b32" => Two(|a, b| u64::from((a as u32).checked_shl(b as u32).unwrap_or(0))),
            "b64" => Two(|a, b| a.checked_shl(b as u32).unwrap_or(0)),
            _ => return None,
        },
        ("shr", false) => match kind {
            "u32" | "b32" => Two(|a, b| u64::from((a as u32).checked_shr(b as u32).unwrap_or(0))),
            "u64" | "b64" => Two(|a, b| a.checked_shr(b as u32).unwrap_or(0)),
            "s32" => Two(|a, b| u64::from(((a as i32) >> (b as u32).min(31)) as u32)),
            "s64" => Two(|a, b| ((a as i64) >> (b as u32).min(63)) as u64),
            _ => return None,
        },
        ("setp", _) => match parts[1] {
            "eq" => compares!(kind, |a, b| a == b),
            "ne" if is_float => unordered!(kind, |a, b| a < b || a > b),
            "ne" => compares!(kind, |a, b| a != b),
            "lt" => compares!(kind, |a, b| a < b),
            "le" => compares!(kind, |a, b| a <= b),
            "gt" => compares!(kind, |a, b| a > b),
            "ge" => compares!(kind, |a, b| a >= b),
            "equ" => unordered!(kind, |a, b| !(a < b || a > b)),
            "neu" => unordered!(kind, |a, b| a != b),
            "ltu" => unordered!(kind, |a, b| !(a >= b)),
            "leu" => unordered!(kind, |a, b| !(a > b)),
            "gtu" => unordered!(kind, |a, b| !(a <= b)),
            "geu" => unordered!(kind, |a, b| !(a < b)),
            "nan" => unordered!(kind, |a, b| a.is_nan() || b.is_nan()),
            "num" => unordered!(kind, |a, b| !a.is_nan() && !b.is_nan()),
            _ => return None,
        },
        ("selp", _) => Three(|a, b, p| if p & 1 == 1 { a } else { b }),
        ("neg", true) => match kind {
            "f32" => One(|a| a ^ (1 << 31)),
            _ => One(|a| a ^ (1 << 63)),
        },
        ("neg", false) => match kind {
            "s32" => One(|a| u64::from((a as u32).wrapping_neg())),
            "s64" => One(|a| a.wrapping_neg()),
            _ => return None,
        },
        ("not", false) => match kind {
            "b32" => One(|a| u64::from(!(a as u32))),
            "b64" => One(|a| !a),
            _ => return None,
        },
        ("abs", true) => match kind {
            "f32" => One(|a| a & 0x7fff_ffff),
            _ => One(|a| a & (u64::MAX >> 1)),
        },
        ("sqrt", true) => match kind {
            "f32" => One(|a| of_f32(f32_of(a).sqrt())),
            _ => One(|a| of_f64(f64_of(a).sqrt())),
        },
        ("rcp", true) => match kind {
            "f32" => One(|a| of_f32(1.0 / f32_of(a))),
            _ => One(|a| of_f64(1.0 / f64_of(a))),
        },
        ("cvta", false) => One(|a| a),
        ("cvt", _) => convert(parts)?,
        _ => return None,
    })
}

fn convert(parts: &[&str]) -> Option<Function> {
    let (to, from) = (parts[parts.len() - 2], parts[parts.len() - 1]);
    Some(match (to, from) {
        ("f64", "f32") => One(|a| of_f64(f64::from(f32_of(a)))),
        ("f32", "f64") if parts[1] == "rn" => One(|a| of_f32(f64_of(a) as f32)),
        ("f64", "u64") if parts[1] == "rn" => One(|a| of_f64(a as f64)),
        ("f64", "s64") if parts[1] == "rn" => One(|a| of_f64(a as i64 as f64)),
        ("f32", "u64") if parts[1] == "rn" => One(|a| of_f32(a as f32)),
        ("f32", "s64") if parts[1] == "rn" => One(|a| of_f32(a as i64 as f32)),
        ("f64", "u32" | "u16" | "u8") if parts[1] == "rn" => One(|a| of_f64(f64::from(a as u32))),
        ("f32", "u32" | "u16" | "u8") if parts[1] == "rn" => One(|a| of_f32(a as u32 as f32)),
        ("f64", "s32") if parts[1] == "rn" => One(|a| of_f64(f64::from(a as i32))),
        ("f32", "s32") if parts[1] == "rn" => One(|a| of_f32(a as i32 as f32)),
        ("s64", "f32") if parts[1] == "rzi" => One(|a| f32_of(a) as i64 as u64),
        ("s64", "f64") if parts[1] == "rzi" => One(|a| f64_of(a) as i64 as u64),
        ("s64", "s32") => One(|a| i64::from(a as i32) as u64),
        ("s64", "s16") => One(|a| i64::from(a as i16) as u64),
        ("s32", "s16") => One(|a| u64::from(i32::from(a as i16) as u32)),
        ("u64" | "s64", "u32") => One(|a| u64::from(a as u32)),
        ("u64" | "u32" | "s32" | "s64", "u16") => One(|a| u64::from(a as u16)),
        ("u64" | "u32" | "u16" | "s16" | "s32" | "s64", "u8") => One(|a| u64::from(a as u8)),
        ("u32" | "s32", "u64" | "s64" | "u32" | "s32") => One(|a| u64::from(a as u32)),
        ("u16" | "s16", "u64" | "s64" | "u32" | "s32" | "u16") => One(|a| u64::from(a as u16)),
        ("u8" | "s8", _) if !from.starts_with('f') => One(|a| u64::from(a as u8)),
        ("u64" | "s64", "u64" | "s64") => One(|a| a),
        _ => return None,
    })
}
