//! Backwards that write into gradients and take arrays that were freed, against one in which everything is held.

use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use crate::Result;
use crate::autograd::backward;
use crate::tensor::{Gradient, Tensor};

/// Arrays of `N · N` elements are large enough to be kept for others.
const N: usize = 48;

fn numbers(seed: usize, shape: &[usize]) -> Tensor {
    let len: usize = shape.iter().product();
    let elements = (0..len)
        .map(|i| ((i * 37 + seed * 101) % 97) as f64 / 48.0 - 1.0)
        .collect::<Vec<_>>();
    Tensor::from_vec(elements, shape).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    let elements: Vec<f64> = tensor.to_vec().unwrap();
    assert!(elements.iter().all(|x| x.is_finite()), "memory that wasn't written");
    elements.into_iter().map(f64::to_bits).collect()
}

fn gradient_bits(gradient: &Gradient) -> Vec<u64> {
    bits(&Tensor::from_data(gradient.to_dense().unwrap()))
}

/// One operation of a program, on two of the values so far.
type Op = (u8, usize, usize);

struct Program {
    leaves: Vec<Tensor>,
    /// Leaves and all that was computed, but for those that were let go of.
    values: Vec<Tensor>,
    loss: Tensor,
}

/// Runs a program. `see` is called with each value as soon as it's there.
fn run(ops: &[Op], see: impl Fn(&Tensor)) -> Result<Program> {
    let leaves = [numbers(1, &[N, N]), numbers(2, &[N, N]), numbers(3, &[N])].map(|x| x.parameter().unwrap());
    let [first, second, row] = &leaves;
    let mut values = vec![first.clone(), second.clone()];
    let size = N as i64;
    for &(op, a, b) in ops {
        let (a, b) = (values[a % values.len()].clone(), values[b % values.len()].clone());
        let value = match op {
            0 => a.relu()?,
            1 => a.tanh()?,
            2 => a.sigmoid()?,
            3 => a.mul_scalar(0.7)?,
            4 => a.add(&b)?.mul_scalar(0.5)?,
            5 => a.sub(&b)?.mul_scalar(0.5)?,
            6 => a.mul(&b)?.tanh()?,
            7 => a.matmul(&b)?.div_scalar(N as f64)?,
            8 => a.transpose(0, 1)?,
            9 => a.reshape(&[size / 2, -1])?.add_scalar(0.1)?.reshape(&[size, size])?,
            10 => a.add(row)?.sin()?,
            11 => a.softmax(1)?.mul(&b)?,
            12 => a.maximum(&b)?,
            13 => a.neg()?.log_softmax(0)?.mul_scalar(0.1)?,
            14 => a.div(&b.mul(&b)?.add_scalar(1.0)?)?,
            15 => Tensor::concat(&[a.slice(0, 0, size / 3, 1)?, b.slice(0, size / 3, size, 1)?], 0)?,
            16 => a.gt(&b)?.where_(&b, &a)?,
            17 => a.sub(row)?.mul(row)?.tanh()?,
            18 => a.reshape(&[2, size / 2, size])?.matmul(&b)?.reshape(&[size, size])?.tanh()?,
            _ => a.mean_axes(&[0], true)?.add(&b)?.mul_scalar(0.5)?,
        };
        see(&value);
        values.push(value);
    }
    let means = values.iter().map(|value| value.mul(value)?.mean()).collect::<Result<Vec<_>>>()?;
    let loss = Tensor::stack(&means, 0)?.sum()?;
    // Some are held by the program's user, others by the graph alone.
    let values = values.into_iter().step_by(2).collect();
    let leaves = leaves.to_vec();
    Ok(Program { leaves, values, loss })
}

impl Program {
    fn gradients(&self) -> Vec<Option<Vec<u64>>> {
        self.leaves.iter().map(|leaf| leaf.grad().as_ref().map(gradient_bits)).collect()
    }

    fn outputs(&self) -> Vec<Vec<u64>> {
        self.values.iter().map(bits).collect()
    }
}

fn check(ops: &[Op]) -> Result<()> {
    // All values and gradients are held to the end, so that nothing can be written in place or taken again.
    let held = Arc::new(Mutex::new(Vec::<(Gradient, Vec<u64>)>::new()));
    let all = Mutex::new(Vec::new());
    let copying = run(ops, |value| {
        let held = held.clone();
        let hook = move |gradient: &Gradient| {
            held.lock().unwrap().push((gradient.clone(), gradient_bits(gradient)));
            None
        };
        let _ = value.register_hook(hook).unwrap();
        all.lock().unwrap().push((value.clone(), bits(value)));
    })?;
    let outputs = copying.outputs();
    copying.loss.backward()?;
    let gradients = copying.gradients();

    for retain in [false, true, true] {
        let program = run(ops, |_| {})?;
        assert_eq!(program.outputs(), outputs);
        program.loss.backward_with(retain)?;
        assert_eq!((program.gradients(), program.outputs()), (gradients.clone(), outputs.clone()));
        if retain {
            let first: Vec<Option<Gradient>> = program.leaves.iter().map(Tensor::grad).collect();
            program.leaves.iter().for_each(Tensor::zero_grad);
            backward(std::slice::from_ref(&program.loss), false)?;
            assert_eq!((program.gradients(), program.outputs()), (gradients.clone(), outputs.clone()));
            let first: Vec<_> = first.iter().map(|gradient| gradient.as_ref().map(gradient_bits)).collect();
            assert_eq!(first, gradients);
        }
    }

    for (value, before) in all.lock().unwrap().iter() {
        assert_eq!(bits(value), *before);
    }
    for (gradient, before) in held.lock().unwrap().iter() {
        assert_eq!(gradient_bits(gradient), *before);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn memory_that_is_used_again_changes_no_bit_and_nothing_that_is_held(
        ops in prop::collection::vec((0u8..20, 0usize..100, 0usize..100), 1..14),
    ) {
        check(&ops).map_err(|e| TestCaseError::fail(e.to_string()))?;
    }
}

#[test]
fn every_operation_alone_and_twice() -> Result<()> {
    (0..20).try_for_each(|op| {
        check(&[(op, 0, 1)])?;
        check(&[(op, 0, 0), (op, 2, 2)])
    })
}
