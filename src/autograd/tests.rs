//! Tests of the engine and of local backward.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::*;
use crate::tensor::{DType, Data, Gradient, Leaf, RowSparse, Spec, Tensor};
use crate::{ErrorKind, Result};

fn leaf(values: &[f64]) -> Tensor {
    Tensor::from_vec(values.to_vec(), values.len()).unwrap().parameter().unwrap()
}

fn scalar(value: f64) -> Tensor {
    Tensor::scalar(value).parameter().unwrap()
}

fn values(gradient: &Gradient) -> Vec<f64> {
    Tensor::from_data(gradient.to_dense().unwrap()).to_vec().unwrap()
}

fn grad(tensor: &Tensor) -> Vec<f64> {
    values(&tensor.grad().expect("a gradient arrived"))
}

/// Keeps what arrives, by leaf.
#[derive(Default)]
struct Kept(Vec<(u64, Vec<f64>)>);

impl LeafSink for Kept {
    fn complete(&mut self, leaf: &Arc<Leaf>, gradient: Gradient) -> Result<()> {
        self.0.push((leaf.id(), values(&gradient)));
        Ok(())
    }
}

#[test]
fn a_diamond_and_a_shared_leaf() {
    let x = leaf(&[2.0, 3.0]);
    let y = (&x * &x).unwrap();
    let z = ((&y * 2.0).unwrap() + (&y * &x).unwrap()).unwrap();
    z.sum().unwrap().backward().unwrap();
    // d(2x² + x³) = 4x + 3x²
    assert_eq!(grad(&x), [8.0 + 12.0, 12.0 + 27.0]);
    z.detach().sum().unwrap();
}

#[test]
fn several_roots_are_summed_and_repeats_accumulate() {
    let x = scalar(3.0);
    let square = (&x * &x).unwrap();
    backward(&[square.clone(), square.clone(), (&x * 5.0).unwrap()], true).unwrap();
    assert_eq!(grad(&x), [17.0]);
    square.backward().unwrap();
    assert_eq!(grad(&x), [23.0]);
    x.zero_grad();
    assert!(x.grad().is_none());
}

#[test]
fn a_freed_graph_is_an_error() {
    let x = scalar(3.0);
    let y = (&x * &x).unwrap();
    let z = y.exp().unwrap();
    z.backward_with(true).unwrap();
    z.backward().unwrap();
    let before = grad(&x);
    let error = z.backward().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::GraphFreed { op } if op == "exp"), "{error}");
    // A new root over a part that was freed: nothing is accumulated.
    let error = (&y + &x).unwrap().backward().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::GraphFreed { op } if op == "mul"), "{error}");
    assert_eq!(grad(&x), before);
}

#[test]
fn roots_are_checked_in_order() {
    let kind = |roots: &[Tensor]| backward(roots, false).unwrap_err().kind().clone();
    assert_eq!(kind(&[]), ErrorKind::NoRoots);
    let x = leaf(&[1.0, 2.0]);
    assert_eq!(kind(&[x.sum().unwrap(), x.detach()]), ErrorKind::RootWithoutGradient { root: 1 });
    assert_eq!(kind(std::slice::from_ref(&x)), ErrorKind::RootNotScalar { root: 0, shape: vec![2] });
    assert_eq!(kind(&[scalar(1.0)]), ErrorKind::RootIsLeaf { root: 0 });
    assert!(x.grad().is_none());
}

#[test]
fn saved_values_are_freed_before_the_leaf_is_told() {
    let x = leaf(&[1.0, 2.0]);
    let weak = x.leaf().unwrap().clone();
    let in_place = Arc::new(Mutex::new(None));
    let seen = in_place.clone();
    let hook = x.register_post_accumulate_hook(move |tensor, gradient| {
        let (_, updated) = tensor.leaf().unwrap().update(|_| Ok(()))?;
        *seen.lock().unwrap() = Some(updated.in_place);
        assert!(gradient.take().is_some());
        Ok(())
    });
    (&x * &x).unwrap().sum().unwrap().backward().unwrap();
    assert_eq!(*in_place.lock().unwrap(), Some(true));
    assert!(x.grad().is_none());
    assert_eq!(weak.version(), 1);
    hook.unwrap().remove();
    (&x * &x).unwrap().sum().unwrap().backward().unwrap();
    assert_eq!(weak.version(), 1);
}

#[test]
fn hooks_replace_gradients_in_order() {
    let x = leaf(&[1.0, 2.0]);
    let y = (&x * 3.0).unwrap();
    let twice = |gradient: &Gradient| {
        let mut gradient = gradient.clone();
        gradient.scale(2.0).unwrap();
        Some(gradient)
    };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let at_y = seen.clone();
    let double = y.register_hook(twice).unwrap();
    let _ = y.register_hook(move |gradient| {
        at_y.lock().unwrap().push(values(gradient));
        None
    });
    let _ = x.register_hook(twice).unwrap();
    let loss = y.sum().unwrap();
    loss.backward_with(true).unwrap();
    assert_eq!(grad(&x), [12.0, 12.0]);
    double.remove();
    x.zero_grad();
    loss.backward().unwrap();
    assert_eq!(grad(&x), [6.0, 6.0]);
    assert_eq!(*seen.lock().unwrap(), [[2.0, 2.0], [1.0, 1.0]]);
    assert!(x.detach().register_hook(|_| None).is_err());
}

#[test]
fn a_hook_must_keep_dtype_and_shape() {
    let x = leaf(&[1.0, 2.0]);
    let _ = x.register_hook(|_| Some(Data::zeros(DType::F64, &[3]).into())).unwrap();
    let error = x.sum().unwrap().backward().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Shape { .. }), "{error}");
    let y = leaf(&[1.0]);
    let _ = y.register_post_accumulate_hook(|_, _| Err(crate::Error::user("no"))).unwrap();
    assert_eq!(y.sum().unwrap().backward().unwrap_err().to_string(), "no");
}

#[test]
fn unused_outputs_of_a_split_count_as_zero() {
    let x = leaf(&[1.0, 2.0, 3.0]);
    let parts = x.split(&[1, 2], 0).unwrap();
    parts[1].sum().unwrap().backward().unwrap();
    assert_eq!(grad(&x), [0.0, 1.0, 1.0]);
}

#[test]
fn a_frozen_leaf_gets_no_gradient() {
    let (x, y) = (scalar(2.0), scalar(3.0));
    x.freeze().unwrap();
    (&x * &y).unwrap().backward().unwrap();
    assert!(x.grad().is_none());
    assert_eq!(grad(&y), [2.0]);
    x.unfreeze().unwrap();
    (&x * &y).unwrap().backward().unwrap();
    assert_eq!(grad(&x), [3.0]);
    assert!(Tensor::scalar(1.0).freeze().is_err());
    assert!(Tensor::scalar(1_i64).parameter().is_err());
}

#[test]
fn nothing_is_recorded_under_no_grad() {
    let x = scalar(2.0);
    assert!(!no_grad(|| (&x * &x).unwrap().requires_grad()));
    let panicked = std::panic::catch_unwind(|| no_grad(|| panic!("in user code")));
    assert!(panicked.is_err() && grad_enabled());
    assert!((&x * &x).unwrap().requires_grad());
}

#[test]
fn deep_graphs_do_not_overflow_the_stack() {
    let x = scalar(1.0);
    let chain = |n: usize| (0..n).fold(x.clone(), |y, _| y.add_scalar(0.0).unwrap());
    chain(200_000).backward().unwrap();
    assert_eq!(grad(&x), [1.0]);
    drop(chain(200_000));
    // A deep tree: each node uses the one before twice.
    let mut y = x.clone();
    for _ in 0..50_000 {
        y = (&y + &y).unwrap().mul_scalar(0.5).unwrap();
    }
    x.zero_grad();
    y.backward().unwrap();
    assert_eq!(grad(&x), [1.0]);
}

#[test]
fn graphs_can_be_used_and_dropped_by_several_threads() {
    let x = leaf(&[1.0; 64]);
    let shared = (&x * 2.0).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    (&shared * &shared).unwrap().sum().unwrap().backward_with(true).unwrap();
                }
            });
        }
    });
    assert_eq!(grad(&x), vec![8.0 * 200.0; 64]);
}

#[test]
fn a_boundary_collects_over_two_marks() {
    let node = Node::boundary(
        7,
        [(DType::F64, &[2][..]), (DType::F64, &[]), (DType::F32, &[1])]
            .map(|(dtype, shape)| Spec::of(&Data::zeros(dtype, shape)))
            .to_vec(),
        None,
    );
    let received = |slot, data| Tensor::with_edge(data, Edge { node: node.clone(), slot });
    let a = received(0, Tensor::from_vec(vec![1.0, 2.0], 2).unwrap().data());
    let b = received(1, Tensor::scalar(4.0).data());
    let w = leaf(&[3.0, 5.0]);
    let (first, second) = ((&a * &w).unwrap(), (&(&a * &b).unwrap() + &w).unwrap());
    let (edges_1, edges_2) = ([first.edge(), None], [second.edge()]);
    let (key_1, key_2) = (Key::next(), Key::next());

    let mut backward = Backward::new(false);
    let mut sink = Kept::default();
    assert_eq!(backward.mark(&key_1, &edges_1).unwrap(), [7]);
    assert!(backward.mark(&key_2, &edges_2).unwrap().is_empty());
    assert!(!backward.is_finished());
    let ones = Gradient::from(Tensor::ones(DType::F64, 2).data());
    backward.give(&key_1, &edges_1, vec![Some(ones.clone()), None]).unwrap();
    assert!(
        backward.run(&mut sink).unwrap().is_empty(),
        "the boundary and the leaf still wait for the second"
    );
    assert!(sink.0.is_empty());
    backward.give(&key_2, &edges_2, vec![Some(ones.clone())]).unwrap();
    let complete = backward.run(&mut sink).unwrap();
    assert!(backward.is_finished());
    assert_eq!(sink.0, [(w.leaf().unwrap().id(), vec![2.0, 3.0])]);
    let (id, gradients) = &complete[0];
    assert_eq!((*id, gradients.len()), (7, 3));
    assert_eq!(values(gradients[0].as_ref().unwrap()), [3.0 + 4.0, 5.0 + 4.0]);
    assert_eq!(values(gradients[1].as_ref().unwrap()), [3.0]);
    assert!(gradients[2].is_none());

    // A local backward can't send gradients away.
    let error = (&b * 2.0).unwrap().backward().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Argument { .. }), "{error}");
}

#[test]
fn a_gradient_left_out_is_zeros_and_a_wrong_one_an_error() {
    let w = leaf(&[3.0, 5.0]);
    let edges = [w.edge(), (&w * 2.0).unwrap().edge()];
    let key = Key::next();
    let mut backward = Backward::new(false);
    backward.mark(&key, &edges).unwrap();
    let wrong = Gradient::from(Data::zeros(DType::F32, &[2]));
    assert!(matches!(
        backward.give(&key, &edges, vec![Some(wrong), None]).unwrap_err().kind(),
        ErrorKind::DType { .. }
    ));
    let wrong = Gradient::from(Data::zeros(DType::F64, &[3]));
    assert!(matches!(
        backward.give(&key, &edges, vec![Some(wrong), None]).unwrap_err().kind(),
        ErrorKind::Shape { .. }
    ));
    assert!(backward.give(&key, &edges, vec![None]).is_err());
    let mut sink = Kept::default();
    backward.give(&key, &edges, vec![None, None]).unwrap();
    backward.run(&mut sink).unwrap();
    assert_eq!(sink.0, [(w.leaf().unwrap().id(), vec![0.0, 0.0])]);
    assert!(backward.give(&key, &edges, vec![None, None]).is_err(), "it wasn't announced twice");
}

/// Numbers whose sum depends on the order of additions.
const PARTS: [f64; 5] = [1e16, 1.0, -1e16, 0.3, 7e-9];

#[test]
fn sums_follow_keys_whatever_the_order_of_arrival() {
    let descending = PARTS.iter().rev().copied().reduce(|sum, part| sum + part).unwrap();
    let ascending = PARTS.iter().copied().reduce(|sum, part| sum + part).unwrap();
    assert_ne!(descending, ascending);
    let frames: [&[u32]; 5] = [&[], &[1], &[1, 0], &[1, 2], &[2]];
    for order in [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3], [3, 4, 0, 2, 1]] {
        let w = scalar(0.0);
        let edges = [w.edge()];
        // Keys that grow with the place in PARTS, made in another order than they arrive in.
        let mut keys: Vec<Key> = frames
            .iter()
            .map(|&frame| {
                let _guard = frame::enter(Arc::from(frame));
                Key::next()
            })
            .collect();
        keys.sort();
        let mut backward = Backward::new(false);
        for i in [3, 1, 4, 0, 2] {
            backward.mark(&keys[i], &edges).unwrap();
        }
        let mut sink = Kept::default();
        for i in order {
            backward
                .give(&keys[i], &edges, vec![Some(Tensor::scalar(PARTS[i]).data().into())])
                .unwrap();
            backward.run(&mut sink).unwrap();
        }
        assert_eq!(sink.0[0].1, [descending], "{order:?}");
    }
}

#[test]
fn frames_are_per_thread_and_restored() {
    let outer = frame::current();
    {
        let _guard = frame::enter(Arc::from([4, 2]));
        assert_eq!(Key::next().frame[..], [4, 2]);
        std::thread::scope(|scope| scope.spawn(|| assert!(frame::current().is_empty())).join()).unwrap();
    }
    assert_eq!(frame::current(), outer);
    let (a, b) = (Key::next(), Key::next());
    assert!(a < b);
}

#[test]
fn rows_outside_of_their_array_are_refused_when_they_arrive() {
    let x = leaf(&[1.0, 2.0]);
    let outside = || {
        Gradient::Sparse(RowSparse {
            rows: vec![2],
            values: Data::zeros(DType::F64, &[1]),
            shape: vec![2],
        })
    };
    let _ = x.register_hook(move |_| Some(outside())).unwrap();
    let told = x.sum().unwrap().backward().unwrap_err();
    assert!(matches!(told.kind(), ErrorKind::Index { index: 2, size: 2, .. }), "{told}");
    assert!(x.grad().is_none());
}

#[test]
fn embedding_gradients_stay_sparse_and_sum() {
    let table = Tensor::from_vec(vec![1.0, 2.0, 3.0, 4.0], (4, 1)).unwrap().parameter().unwrap();
    let ids = |ids: &[i64]| Tensor::from_vec(ids.to_vec(), ids.len()).unwrap();
    let sum = (table.embedding(&ids(&[1, 1])).unwrap().sum().unwrap() + table.embedding(&ids(&[3])).unwrap().sum().unwrap()).unwrap();
    sum.backward().unwrap();
    let gradient = table.grad().unwrap();
    assert!(gradient.is_sparse());
    assert_eq!(values(&gradient), [0.0, 2.0, 0.0, 1.0]);
    let Gradient::Sparse(rows) = gradient.coalesce().unwrap() else {
        panic!("it was sparse")
    };
    assert_eq!(rows.rows, [1, 3]);
    // With a dense use as well it becomes dense.
    table.zero_grad();
    (table.embedding(&ids(&[0])).unwrap().sum().unwrap() + table.sum().unwrap())
        .unwrap()
        .backward()
        .unwrap();
    assert!(!table.grad().unwrap().is_sparse());
    assert_eq!(grad(&table), [2.0, 1.0, 1.0, 1.0]);
    // A table that was computed passes the rows on as a dense gradient.
    table.zero_grad();
    (&table * 2.0)
        .unwrap()
        .embedding(&ids(&[2, 2]))
        .unwrap()
        .sum()
        .unwrap()
        .backward()
        .unwrap();
    assert_eq!(grad(&table), [0.0, 0.0, 4.0, 0.0]);
}

mod functions {
    use ndarray::{ArrayD, ArrayViewD, IxDyn};

    use super::*;
    use crate::autograd::function::apply;

    /// `(x + y, x y)`, with an adjoint that can be made wrong.
    struct SumAndProduct {
        fault: Option<&'static str>,
        runs: Arc<AtomicUsize>,
    }

    impl Function<f64> for SumAndProduct {
        type Saved = (ArrayD<f64>, ArrayD<f64>);

        fn forward(&self, inputs: &[ArrayViewD<'_, f64>]) -> Result<(Vec<ArrayD<f64>>, Self::Saved)> {
            let (x, y) = (inputs[0].to_owned(), inputs[1].to_owned());
            Ok((vec![&x + &y, &x * &y], (x, y)))
        }

        fn adjoint(&self, (x, y): &Self::Saved, g: &[ArrayViewD<'_, f64>], needs: &[bool]) -> Result<Vec<Option<ArrayD<f64>>>> {
            self.runs.fetch_add(1, Ordering::Relaxed);
            match self.fault {
                Some("count") => return Ok(vec![None]),
                Some("shape") => return Ok(vec![Some(ArrayD::zeros(IxDyn(&[9]))), None]),
                Some(_) => return Err(crate::Error::user("the solver diverged")),
                None => {}
            }
            Ok(vec![needs[0].then(|| &g[0] + &(y * &g[1])), needs[1].then(|| &g[0] + &(x * &g[1]))])
        }
    }

    fn run(fault: Option<&'static str>) -> (Tensor, Result<()>) {
        let x = leaf(&[2.0, 3.0]);
        let runs = Arc::new(AtomicUsize::new(0));
        let y = Tensor::from_vec(vec![5.0, 7.0], 2).unwrap();
        let outputs = apply(SumAndProduct { fault, runs: runs.clone() }, &[&x, &y]).unwrap();
        let result = outputs[1].sum().unwrap().backward();
        assert_eq!(runs.load(Ordering::Relaxed), 1);
        (x, result)
    }

    #[test]
    fn a_function_with_two_outputs() {
        let (x, result) = run(None);
        result.unwrap();
        assert_eq!(grad(&x), [5.0, 7.0]);
    }

    #[test]
    fn faults_of_an_adjoint_are_typed() {
        let (_, result) = run(Some("count"));
        assert!(matches!(result.unwrap_err().kind(), ErrorKind::Argument { op, .. } if op.contains("SumAndProduct")));
        let (_, result) = run(Some("shape"));
        assert!(matches!(result.unwrap_err().kind(), ErrorKind::Shape { op, .. } if op.contains("SumAndProduct")));
        let (_, result) = run(Some("diverge"));
        assert_eq!(result.unwrap_err().to_string(), "the solver diverged");
        let wrong = Tensor::scalar(1.0_f32);
        let error = apply(
            SumAndProduct {
                fault: None,
                runs: Arc::default(),
            },
            &[&wrong, &wrong],
        )
        .unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::DType { .. }), "{error}");
    }
}
