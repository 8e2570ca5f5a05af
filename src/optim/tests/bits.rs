//! The bits of every rule's results, against those in `tests/golden/bits.txt`.
//!
//! `scripts/bits` runs this in builds for other instruction sets, too. After a deliberate change of a rule's arithmetic, `WRITE_BITS=1` writes
//! the file anew.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};

use crate::optim::arithmetic::{PIECE, instruction_sets, limit_instructions};
use crate::optim::{ComputeThreads, Norm, Optimizer, OptimizerSpec, names};
use crate::tensor::{DType, Data, Device, Gradient, RowSparse, Tensor};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/bits.txt");
const STEPS: u64 = 6;
/// More elements than one block of a sum, in no round number; and fewer than a vector register holds.
const SHAPES: [&[usize]; 2] = [&[67, 71], &[3]];

/// For rules of matrices: a wide one, a tall one, and one of fewer elements than a vector register holds.
const MATRICES: [&[usize]; 3] = [&[67, 71], &[19, 9], &[3, 1]];

/// Sets of options, and whether gradients are sparse.
pub(super) fn variants(name: &str) -> Vec<(Value, bool)> {
    let dense = |sets: &[Value]| sets.iter().map(|set| (set.clone(), false)).collect::<Vec<_>>();
    let betas = json!([0.8, 0.97]);
    match name {
        "Adadelta" => dense(&[
            json!({}),
            json!({"lr": 0.7, "rho": 0.8, "eps": 1e-5, "weight_decay": 0.1, "maximize": true}),
        ]),
        "Adafactor" => dense(&[
            json!({}),
            json!({"lr": 0.3, "beta2_decay": -0.7, "eps": [1e-6, 0.01], "d": 1.5, "weight_decay": 0.1, "maximize": true}),
        ]),
        "Adagrad" => [
            dense(&[
                json!({}),
                json!({"lr": 0.3, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-7, "maximize": true}),
            ]),
            vec![(json!({"lr_decay": 0.1}), true)],
        ]
        .concat(),
        "Adam" => dense(&[
            json!({}),
            json!({"lr": 0.1, "betas": betas, "eps": 1e-6, "weight_decay": 0.1, "amsgrad": true, "maximize": true}),
            json!({"weight_decay": 0.1, "decoupled_weight_decay": true}),
        ]),
        "AdamW" => dense(&[
            json!({}),
            json!({"lr": 0.1, "betas": betas, "eps": 1e-6, "weight_decay": 0.1, "amsgrad": true, "maximize": true}),
        ]),
        "Adamax" => dense(&[
            json!({}),
            json!({"lr": 0.1, "betas": betas, "eps": 1e-6, "weight_decay": 0.1, "maximize": true}),
        ]),
        "ASGD" => dense(&[
            json!({}),
            json!({"lr": 0.1, "lambd": 0.01, "alpha": 0.6, "t0": 2.0, "weight_decay": 0.1, "maximize": true}),
        ]),
        "LAMB" => dense(&[
            json!({}),
            json!({"lr": 0.1, "betas": betas, "eps": 1e-5, "weight_decay": 0.0, "maximize": true}),
        ]),
        "Lion" => dense(&[json!({}), json!({"lr": 0.1, "betas": betas, "weight_decay": 0.1, "maximize": true})]),
        "Muon" => dense(&[
            json!({}),
            json!({"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "nesterov": false, "ns_coefficients": [3.0, -4.5, 2.0], "eps": 1e-5,
                "ns_steps": 2, "adjust_lr_fn": "match_rms_adamw", "maximize": true}),
        ]),
        "NAdam" => dense(&[
            json!({}),
            json!({"lr": 0.1, "betas": betas, "eps": 1e-6, "weight_decay": 0.1, "momentum_decay": 0.01, "maximize": true}),
            json!({"weight_decay": 0.1, "decoupled_weight_decay": true}),
        ]),
        "RAdam" => dense(&[
            json!({}),
            json!({"lr": 0.1, "betas": betas, "eps": 1e-6, "weight_decay": 0.1, "maximize": true}),
            json!({"weight_decay": 0.1, "decoupled_weight_decay": true}),
        ]),
        "RMSprop" => dense(&[
            json!({}),
            json!({"lr": 0.1, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.1, "maximize": true}),
            json!({"centered": true}),
            json!({"momentum": 0.9}),
            json!({"momentum": 0.9, "centered": true}),
        ]),
        "Rprop" => dense(&[
            json!({}),
            json!({"lr": 0.1, "etas": [0.4, 1.3], "step_sizes": [1e-3, 0.2], "maximize": true}),
        ]),
        "SGD" => [
            dense(&[
                json!({}),
                json!({"lr": 0.1, "weight_decay": 0.1, "maximize": true}),
                json!({"momentum": 0.9, "dampening": 0.1}),
                json!({"momentum": 0.9, "nesterov": true}),
            ]),
            vec![(json!({"lr": 0.1}), true), (json!({"momentum": 0.9}), true)],
        ]
        .concat(),
        "SparseAdam" => vec![
            (json!({}), true),
            (json!({"lr": 0.1, "betas": betas, "eps": 1e-6, "maximize": true}), true),
        ],
        _ => vec![],
    }
}

/// Numbers from -2 to 2 without a platform's functions (Steele, Lea, Flood, *Fast splittable pseudorandom number generators*, 2014).
fn numbers(n: usize, seed: u64) -> Vec<f64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 51) as f64 - 2.0
    };
    (0..n).map(|_| next()).collect()
}

fn tensor(dtype: DType, shape: &[usize], seed: u64) -> Tensor {
    let values = numbers(shape.iter().product(), seed);
    match dtype {
        DType::F32 => Tensor::from_vec(values.into_iter().map(|x| x as f32).collect(), shape).unwrap(),
        _ => Tensor::from_vec(values, shape).unwrap(),
    }
}

/// FNV-1a, 64 bits.
fn absorb(hash: &mut u64, bytes: &[u8]) {
    for &byte in bytes {
        *hash = (*hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
}

fn absorb_data(hash: &mut u64, data: &Data) {
    match data.dtype() {
        DType::F32 => data
            .view::<f32>()
            .unwrap()
            .iter()
            .for_each(|x| absorb(hash, &x.to_bits().to_le_bytes())),
        _ => data
            .view::<f64>()
            .unwrap()
            .iter()
            .for_each(|x| absorb(hash, &x.to_bits().to_le_bytes())),
    }
}

/// The hash of parameters and state, over all steps.
fn bits(spec: OptimizerSpec, dtype: DType, sparse: bool, device: Device) -> u64 {
    let shapes: &[&[usize]] = match spec.name() {
        "Muon" => &MATRICES,
        _ if sparse => &SHAPES[..1],
        _ => &SHAPES,
    };
    hash_on(device, spec, dtype, sparse, shapes, STEPS)
}

fn hash(spec: OptimizerSpec, dtype: DType, sparse: bool, shapes: &[&[usize]], steps: u64) -> u64 {
    hash_on(Device::Cpu, spec, dtype, sparse, shapes, steps)
}

fn hash_on(device: Device, spec: OptimizerSpec, dtype: DType, sparse: bool, shapes: &[&[usize]], steps: u64) -> u64 {
    let parameters: Vec<Tensor> = shapes
        .iter()
        .zip(1..)
        .map(|(shape, seed)| tensor(dtype, shape, seed).to(device).unwrap().parameter().unwrap())
        .collect();
    let mut optimizer = Optimizer::new(spec, parameters.clone()).unwrap();
    let mut hash = 0xcbf2_9ce4_8422_2325;
    for step in 0..steps {
        let gradient = |place: usize| {
            let seed = 100 + 10 * step + place as u64;
            match sparse {
                true => {
                    let rows = vec![5, step as i64, 60, 5];
                    let values = tensor(dtype, &[rows.len(), shapes[place][1]], seed).data();
                    Gradient::Sparse(RowSparse::new(rows, values, shapes[place].to_vec()).unwrap())
                }
                false => Gradient::Dense(tensor(dtype, shapes[place], seed).data()),
            }
        };
        optimizer.step(&mut |place| Some(gradient(place))).unwrap();
        for (place, p) in parameters.iter().enumerate() {
            absorb_data(&mut hash, &p.data().to(Device::Cpu).unwrap());
            let state = optimizer.state(place).unwrap();
            state.scalars().for_each(|(_, x)| absorb(&mut hash, &x.to_bits().to_le_bytes()));
            let arrays = state.arrays().map(|(_, data)| data.to(Device::Cpu).unwrap());
            arrays.for_each(|data| absorb_data(&mut hash, &data));
        }
    }
    hash
}

/// Runs `f` for each instruction set that this processor has.
fn on_each_instruction_set(mut f: impl FnMut(&str)) {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for (place, set) in instruction_sets().into_iter().enumerate() {
        limit_instructions(place);
        f(set);
    }
    limit_instructions(usize::MAX);
}

#[test]
fn the_bits_are_those_in_the_file_on_every_instruction_set() {
    on_each_instruction_set(|set| compare(set, Device::Cpu));
}

/// Kernels give the bits of the loops.
#[cfg(feature = "cuda")]
#[test]
fn the_bits_on_a_gpu_are_those_in_the_file() {
    let (device, _turn) = crate::tensor::device::testing::device();
    compare("a GPU", device);
}

fn compare(set: &str, device: Device) {
    let mut found = String::new();
    for name in names() {
        let variants = variants(name);
        let defaults = OptimizerSpec::from_json(name, &json!({})).unwrap().to_json();
        for (option, default) in defaults.as_object().unwrap() {
            let changed = variants
                .iter()
                .any(|(set, _)| set.get(option).is_some_and(|value| value != default));
            assert!(changed, "{name}: no variant changes `{option}`");
        }
        for (options, sparse) in variants {
            for dtype in [DType::F32, DType::F64] {
                let spec = OptimizerSpec::from_json(name, &options).unwrap();
                let form = if sparse { "sparse" } else { "dense" };
                writeln!(found, "{name} {dtype} {form} {options} {:016x}", bits(spec, dtype, sparse, device)).unwrap();
            }
        }
    }
    if device == Device::Cpu && std::env::var_os("WRITE_BITS").is_some() {
        std::fs::write(FILE, &found).unwrap();
    }
    let expected = std::fs::read_to_string(FILE).unwrap();
    let lines = |text: &str| -> BTreeMap<String, String> {
        let split = text.lines().filter_map(|line| line.rsplit_once(' '));
        split.map(|(case, hash)| (case.to_owned(), hash.to_owned())).collect()
    };
    let (found, expected) = (lines(&found), lines(&expected));
    let differ: Vec<_> = found
        .iter()
        .filter(|(case, hash)| expected.get(*case) != Some(hash))
        .map(|(case, _)| case)
        .collect();
    assert!(
        differ.is_empty() && found.len() == expected.len(),
        "other bits than in {FILE} on {set}: {differ:#?}"
    );
}

/// Lengths around those of vectors and of blocks.
const LENGTHS: [usize; 8] = [1, 5, 15, 17, 33, 4095, 4097, 2 * PIECE + 13];

#[test]
fn every_length_has_the_same_bits_on_every_instruction_set() {
    for (name, options, dtype) in dense_cases() {
        let spec = OptimizerSpec::from_json(name, &options).unwrap();
        let mut first = None;
        on_each_instruction_set(|set| {
            let found = LENGTHS.map(|n| hash(spec.clone(), dtype, false, &[&[n]], 2));
            assert_eq!(*first.get_or_insert(found), found, "{name} {dtype} {options} on {set}");
        });
    }
}

#[test]
fn pieces_and_threads_change_no_bit() {
    // Some pieces, the last one not whole; and enough of them for several threads.
    let shapes: [&[usize]; 2] = [&[3, PIECE - 1], &[9 * PIECE - 7]];
    for (name, options, dtype) in dense_cases() {
        let spec = OptimizerSpec::from_json(name, &options).unwrap();
        let alone = hash(spec.clone(), dtype, false, &shapes, 2);
        let threads = ComputeThreads::new(3);
        assert_eq!(hash(spec.clone(), dtype, false, &shapes, 2), alone, "{name} {dtype} {options}");
        drop(threads);
        if spec.rule().is_elementwise() {
            // The same elements as parameters of their own, each too small for pieces.
            let n = shapes[1][0];
            let parts: Vec<usize> = (0..n).step_by(10_007).map(|start| 10_007.min(n - start)).collect();
            assert_eq!(
                updated(&spec, dtype, &[n]),
                updated(&spec, dtype, &parts),
                "{name} {dtype} {options}"
            );
        }
    }
}

/// The same elements after two steps, whatever parameters they are split over.
fn updated(spec: &OptimizerSpec, dtype: DType, parts: &[usize]) -> Vec<u64> {
    let split = |seed: u64| -> Vec<Tensor> {
        let (all, mut start) = (numbers(parts.iter().sum(), seed), 0);
        let part = |&len: &usize| {
            let part = all[start..start + len].to_vec();
            start += len;
            match dtype {
                DType::F32 => Tensor::from_vec(part.into_iter().map(|x| x as f32).collect(), [len]).unwrap(),
                _ => Tensor::from_vec(part, [len]).unwrap(),
            }
        };
        parts.iter().map(part).collect()
    };
    let parameters: Vec<Tensor> = split(1).into_iter().map(|p| p.parameter().unwrap()).collect();
    let mut optimizer = Optimizer::new(spec.clone(), parameters.clone()).unwrap();
    for step in 0..2 {
        let gradients = split(10 + step);
        optimizer.step(&mut |place| Some(gradients[place].data().into())).unwrap();
    }
    let elements = |p: &Tensor| match dtype {
        DType::F32 => p.to_vec::<f32>().unwrap().into_iter().map(f64::from).collect::<Vec<_>>(),
        _ => p.to_vec().unwrap(),
    };
    parameters.iter().flat_map(elements).map(f64::to_bits).collect()
}

/// Options of each rule that takes dense gradients of any shape, with each dtype.
fn dense_cases() -> impl Iterator<Item = (&'static str, Value, DType)> {
    let names = names().into_iter().filter(|&name| name != "Muon");
    let cases = names.flat_map(|name| variants(name).into_iter().filter(|v| !v.1).map(move |v| (name, v.0)));
    cases.flat_map(|(name, options)| [DType::F32, DType::F64].map(|dtype| (name, options.clone(), dtype)))
}

#[test]
fn norms_have_the_same_bits_before_an_update_and_in_it() {
    let n = 9 * PIECE - 7;
    // Passes over none to three arrays of state, and the pass of LAMB, which sums more.
    let rules: [(&str, Value); 5] = [
        ("SGD", json!({"lr": 0.1})),
        ("SGD", json!({"lr": 0.1, "momentum": 0.9})),
        ("Adam", json!({})),
        ("Adam", json!({"amsgrad": true})),
        ("LAMB", json!({})),
    ];
    let same = |(name, options): &(&str, Value), kind: Norm, dtype: DType| {
        let p = tensor(dtype, &[n], 1).parameter().unwrap();
        let mut optimizer = Optimizer::new(OptimizerSpec::from_json(name, options).unwrap(), vec![p]).unwrap();
        let gradient = Gradient::Dense(tensor(dtype, &[n], 2).data());
        let before = optimizer.check(vec![Some(gradient.clone())], kind).unwrap();
        let norm = before.norms().unwrap()[0];
        let during = optimizer.check(vec![Some(gradient)], kind).unwrap();
        assert_eq!(optimizer.apply(during).unwrap()[0].norm, norm, "{name} {options} {kind:?} {dtype}");
        assert_eq!(optimizer.apply(before).unwrap()[0].norm, norm, "{name} {options} {kind:?} {dtype}");
        assert!(norm.is_some_and(|norm| norm > 1.0));
    };
    for dtype in [DType::F32, DType::F64] {
        rules.iter().for_each(|rule| same(rule, Norm::Two, dtype));
        same(&rules[0], Norm::One, dtype);
        same(&rules[0], Norm::Inf, dtype);
        let threads = ComputeThreads::new(3);
        same(&rules[2], Norm::Two, dtype);
        drop(threads);
    }
}
