//! Optimizers in backward on one rank: what torch tests and says of them, and what is ours.

use std::sync::{Arc, Barrier};

use serde_json::json;

use super::*;
use crate::autograd::backward;
use crate::optim::schedule::{Adjust, Scheduler, Step};
use crate::optim::{Adagrad, Adam, Muon, Optimizer, Sgd, SparseAdam};
use crate::tensor::{DType, Data, Gradient};

fn vector(values: &[f64]) -> Tensor {
    Tensor::from_vec(values.to_vec(), values.len()).unwrap()
}

fn parameter(values: &[f64]) -> Tensor {
    vector(values).parameter().unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_vec().unwrap()
}

fn numbers(shape: &[usize], seed: usize) -> Tensor {
    let n = shape.iter().product::<usize>();
    let values = (0..n).map(|i| ((i * 37 + seed * 101) % 97) as f64 / 97.0 - 0.5).collect();
    Tensor::from_vec(values, shape).unwrap()
}

fn attach<'a>(spec: impl Into<OptimizerSpec>, parameters: impl IntoIterator<Item = &'a Tensor>) -> InBackwardOptimizers {
    optimizer_in_backward(spec, parameters, InBackward::default()).unwrap()
}

/// `factor · Σ tensor`, which has the gradient `factor`.
fn scaled(tensor: &Tensor, factor: f64) -> Tensor {
    tensor.mul_scalar(factor).unwrap().sum().unwrap()
}

/// Steps an optimizer with what its parameters have gathered.
fn step(optimizer: &mut Optimizer) {
    let parameters: Vec<Tensor> = optimizer.parameters().cloned().collect();
    optimizer.step(&mut |i| parameters[i].leaf()?.take_grad()).unwrap();
}

/// Weights and biases of two linear layers of 10 x 10.
fn network() -> [Tensor; 4] {
    [[10, 10].as_slice(), &[10], &[10, 10], &[10]]
        .map(|shape| numbers(shape, shape.len()))
        .map(|tensor| tensor.parameter().unwrap())
}

fn loss([w, b, v, c]: [&Tensor; 4], batch: usize) -> Tensor {
    let x = numbers(&[4, 10], batch);
    let h = (x.matmul(w).unwrap() + b).unwrap().tanh().unwrap();
    (h.matmul(v).unwrap() + c).unwrap().sum().unwrap()
}

fn equal<'a>(left: impl IntoIterator<Item = &'a Tensor>, right: impl IntoIterator<Item = &'a Tensor>) {
    for (left, right) in left.into_iter().zip(right) {
        let bits = |t: &Tensor| values(t).into_iter().map(f64::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(left), bits(right));
    }
}

#[test]
fn weights_and_biases_have_rates_of_their_own() {
    let (ours, plain) = (network(), network());
    attach(Sgd::new(1.0), [&ours[0], &ours[2]]);
    attach(Sgd::new(0.5), [&ours[1], &ours[3]]);
    let mut weights = Optimizer::new(Sgd::new(1.0), vec![plain[0].clone(), plain[2].clone()]).unwrap();
    let mut biases = Optimizer::new(Sgd::new(0.5), vec![plain[1].clone(), plain[3].clone()]).unwrap();
    for batch in 0..6 {
        loss(ours.each_ref(), batch).backward().unwrap();
        loss(plain.each_ref(), batch).backward().unwrap();
        assert!(plain.iter().all(|p| p.grad().is_some()) && ours.iter().all(|p| p.grad().is_none()));
        step(&mut weights);
        step(&mut biases);
        equal(&ours, &plain);
    }
}

#[test]
fn shared_parameters_are_updated_once_an_optimizer() {
    let (ours, plain) = (network(), network());
    let tied = |p: &[Tensor; 4], batch| loss([&p[0], &p[1], &p[0], &p[3]], batch);
    // The shared weight is listed twice, and so has two optimizers.
    let attached = attach(Sgd::new(0.1), [&ours[0], &ours[1], &ours[0], &ours[3]]);
    assert_eq!(attached.len(), 4);
    let mut first = Optimizer::new(Sgd::new(0.1), vec![plain[0].clone(), plain[1].clone(), plain[3].clone()]).unwrap();
    let mut second = Optimizer::new(Sgd::new(0.1), vec![plain[0].clone()]).unwrap();
    for batch in 0..6 {
        tied(&ours, batch).backward().unwrap();
        tied(&plain, batch).backward().unwrap();
        let gradient = plain[0].grad().unwrap();
        step(&mut first);
        second.step_one(0, gradient).unwrap();
        equal(&ours, &plain);
    }
}

#[test]
fn without_the_hook_it_is_only_attached() {
    let w = parameter(&[1.0]);
    let quiet = InBackward {
        register_hook: false,
        ..InBackward::default()
    };
    let mut attached = optimizer_in_backward(Sgd::new(0.1), [&w], quiet).unwrap();
    scaled(&w, 1.0).backward().unwrap();
    assert_eq!((values(&w), w.grad().is_some()), (vec![1.0], true));
    assert_eq!(optimizers_in_backward([&w]).unwrap().len(), 1);
    // Its user drives it.
    let gradient = w.leaf().unwrap().take_grad().unwrap();
    assert!(attached.step(0, gradient).unwrap().unwrap().updated);
    assert_eq!(values(&w), [0.9]);
    // Another one that backwards run makes them run this one, too, in the order attached.
    let hooked = attach(Sgd::new(0.01), [&w]);
    scaled(&w, 1.0).backward().unwrap();
    assert_eq!(values(&w), [0.9 - 0.1 - 0.01]);
    hooked.detach();
    scaled(&w, 1.0).backward().unwrap();
    assert_eq!((values(&w), w.grad().is_some()), (vec![0.9 - 0.1 - 0.01], true));
}

#[test]
fn several_optimizers_of_a_parameter_run_in_their_order() {
    let (ours, plain) = (network(), network());
    attach(Sgd::new(0.03), &ours);
    attach(Sgd::new(0.01), &ours);
    let mut optimizers = [0.03, 0.01].map(|lr| Optimizer::new(Sgd::new(lr), plain.to_vec()).unwrap());
    for batch in 0..6 {
        loss(ours.each_ref(), batch).backward().unwrap();
        loss(plain.each_ref(), batch).backward().unwrap();
        let gradients: Vec<_> = plain.iter().map(|p| p.leaf().unwrap().take_grad()).collect();
        for optimizer in &mut optimizers {
            optimizer.step(&mut |i| gradients[i].clone()).unwrap();
        }
        equal(&ours, &plain);
    }
    // The order shows where updates don't commute: with weight decay, (1 - .5) - .5 · (1 - .5) and (1 - .5 · (1 + 1)) - .5.
    for (first, second, result) in [(0.0, 1.0, -0.25), (1.0, 0.0, -0.5)] {
        let w = parameter(&[1.0]);
        attach(Sgd::new(0.5).weight_decay(first), [&w]);
        attach(Sgd::new(0.5).weight_decay(second), [&w]);
        scaled(&w, 1.0).backward().unwrap();
        assert_eq!(values(&w), [result]);
    }
}

#[test]
fn what_torch_says() {
    let run = |attached: &[f64], root: fn(&Tensor) -> Tensor| {
        let w = parameter(&[1.0]);
        for &lr in attached {
            attach(Sgd::new(lr), [&w]);
        }
        root(&w).backward().unwrap();
        assert!(w.grad().is_none());
        values(&w)[0]
    };
    assert_eq!(run(&[0.1, 0.01], |w| scaled(w, 1.0)), 1.0 - 0.1 - 0.01);
    // Used twice in the graph: one step on the sum.
    assert_eq!(run(&[0.1], |w| (scaled(w, 1.0) + scaled(w, 2.0)).unwrap()), 1.0 - 0.1 * 3.0);
    let w = parameter(&[1.0]);
    attach(Sgd::new(0.1), [&w, &w]);
    scaled(&w, 1.0).backward().unwrap();
    assert_eq!(values(&w), [1.0 - 0.1 - 0.1]);
    // An optimizer outside of it finds no gradient.
    let mut outside = Optimizer::new(Sgd::new(10.0), vec![w.clone()]).unwrap();
    assert!(!outside.step(&mut |_| w.grad()).unwrap()[0].updated);
    // Two Adams have a state each.
    let w = parameter(&[1.0]);
    let adams = attach(Adam::new(0.1), [&w, &w]);
    assert!(adams.state(0).unwrap().is_none());
    scaled(&w, 1.0).backward().unwrap();
    for place in 0..2 {
        assert_eq!(adams.state(place).unwrap().unwrap().scalar("step"), Some(1.0));
    }
    // A graph that was retained keeps the values that it saw; torch fails here.
    let w = parameter(&[3.0]);
    attach(Sgd::new(1.0), [&w]);
    let square = (&w * &w).unwrap().sum().unwrap();
    square.backward_with(true).unwrap();
    assert_eq!(values(&w), [-3.0]);
    square.backward().unwrap();
    assert_eq!(values(&w), [-9.0]);
}

#[test]
fn options_change_by_hand_and_by_schedule() {
    let (w, b) = (parameter(&[1.0]), parameter(&[1.0]));
    let mut fast = attach(Sgd::new(0.5), [&w]);
    attach(Sgd::new(0.25), [&b]);
    fast.set_lr(0.125).unwrap();
    scaled(&w, 1.0).backward().unwrap();
    assert_eq!((values(&w), fast.spec(0)), (vec![0.875], Some(&Sgd::new(0.125).into())));
    let error = fast.set_options(&json!({"lr": 1.0, "nesterov": true})).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::OptionValue { option, .. } if option == "nesterov"),
        "{error}"
    );
    assert!(matches!(fast.set_lr(f64::NAN).unwrap_err().kind(), ErrorKind::OptionValue { .. }));
    assert!(matches!(fast.adjust(1, &json!({})).unwrap_err().kind(), ErrorKind::Argument { .. }));
    assert_eq!(fast.spec(0), Some(&Sgd::new(0.125).into()));
    // All of a model, in its order, each group from its own rate.
    let mut all = optimizers_in_backward([&b, &w, &b]).unwrap();
    assert_eq!(
        all.parameters().map(|p| p.leaf().unwrap().id()).collect::<Vec<_>>(),
        [b, w].each_ref().map(|p| p.leaf().unwrap().id())
    );
    let mut scheduler = Scheduler::new(Step::new(1).gamma(0.5), &mut all).unwrap();
    scheduler.step(&mut all).unwrap();
    assert_eq!(
        (all.spec(0), all.spec(1)),
        (Some(&Sgd::new(0.125).into()), Some(&Sgd::new(0.0625).into()))
    );
    let w = all.parameters().nth(1).unwrap().clone();
    scaled(&w, 1.0).backward().unwrap();
    assert_eq!(values(&w), [0.8125]);
    all.detach();
    assert!(optimizers_in_backward([&w]).unwrap().is_empty());
    scaled(&w, 1.0).backward().unwrap();
    assert_eq!((values(&w), w.grad().is_some()), (vec![0.8125], true));
}

#[test]
fn what_can_not_be_attached_is_refused_and_named() {
    let good = parameter(&[1.0]);
    let (frozen, computed, constant) = (parameter(&[1.0]), good.mul_scalar(2.0).unwrap(), vector(&[1.0]));
    frozen.leaf().unwrap().set_name("fc.bias");
    frozen.freeze().unwrap();
    for (bad, why) in [
        (&frozen, "parameter 1 (`fc.bias`)"),
        (&computed, "computed"),
        (&constant, "requires no gradient"),
    ] {
        let error = optimizer_in_backward(Sgd::new(0.1), [&good, bad], InBackward::default()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::NotALeaf { .. }), "{error}");
        for text in ["SGD in backward", "parameter 1", why] {
            assert!(error.to_string().contains(text), "{error}");
        }
    }
    let error = optimizer_in_backward(Muon::new(0.1), [&good], InBackward::default()).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Argument { what, .. } if what.contains("parameter 0")),
        "{error}"
    );
    let none: [&Tensor; 0] = [];
    let kind = |spec: Sgd, options: InBackward| optimizer_in_backward(spec, [&good], options).unwrap_err().kind().clone();
    let default = InBackward::default;
    assert!(matches!(
        optimizer_in_backward(Sgd::new(0.1), none, default()).unwrap_err().kind(),
        ErrorKind::NoParameters { .. }
    ));
    assert!(matches!(kind(Sgd::new(-1.0), default()), ErrorKind::OptionValue { option, .. } if option == "lr"));
    let every = InBackward { every: 0, ..default() };
    assert!(matches!(kind(Sgd::new(0.1), every), ErrorKind::OptionValue { option, .. } if option == "every"));
    for limit in [0.0, -1.0, f64::NAN] {
        let clip_value = Some(limit);
        assert!(
            matches!(kind(Sgd::new(0.1), InBackward { clip_value, ..default() }), ErrorKind::OptionValue { option, .. } if option == "clip_value")
        );
    }
    let norm = InBackward {
        clip_norm: Some(1.0),
        ..default()
    };
    assert!(
        matches!(kind(Sgd::new(0.1), norm), ErrorKind::Argument { what, .. } if what.contains("clip_norm") && what.contains("use `clip_value`"))
    );
    let all = InBackward {
        all_or_nothing: true,
        ..default()
    };
    assert!(
        matches!(kind(Sgd::new(0.1), all), ErrorKind::Argument { what, .. } if what.contains("all_or_nothing") && what.contains("step"))
    );
    assert!(optimizers_in_backward([&good, &frozen, &computed]).unwrap().is_empty());
}

#[test]
fn the_gradients_of_some_backwards_are_summed() {
    let (ours, plain) = (parameter(&[1.0, 2.0]), parameter(&[1.0, 2.0]));
    let third = InBackward {
        every: 3,
        ..InBackward::default()
    };
    let attached = optimizer_in_backward(Adam::new(0.1), [&ours], third).unwrap();
    let mut optimizer = Optimizer::new(Adam::new(0.1), vec![plain.clone()]).unwrap();
    for turn in 0..9 {
        for p in [&ours, &plain] {
            (p * &vector(&[0.1 + f64::from(turn), 0.7]))
                .unwrap()
                .sum()
                .unwrap()
                .backward()
                .unwrap();
        }
        assert!(ours.grad().is_none());
        if turn % 3 == 2 {
            step(&mut optimizer);
        }
        equal([&ours], [&plain]);
        let steps = attached.state(0).unwrap().and_then(|state| state.scalar("step"));
        assert_eq!(steps.unwrap_or(0.0), f64::from((turn + 1) / 3));
    }
}

#[test]
fn values_are_clipped_and_gradients_kept() {
    let w = parameter(&[0.0, 0.0, 0.0]);
    let options = InBackward {
        clip_value: Some(0.5),
        keep_gradient: true,
        ..InBackward::default()
    };
    let attached = optimizer_in_backward(Sgd::new(1.0), [&w], options).unwrap();
    assert!(attached.gradient(0).unwrap().is_none());
    (&w * &vector(&[2.0, -3.0, 0.25])).unwrap().sum().unwrap().backward().unwrap();
    assert_eq!(values(&w), [-0.5, 0.5, -0.25]);
    // It is kept for inspection only: the leaf has none, and the next one doesn't add to it.
    let kept = |a: &InBackwardOptimizers| values(&Tensor::from_data(a.gradient(0).unwrap().unwrap().to_dense().unwrap()));
    assert_eq!(kept(&attached), [0.5, -0.5, 0.25]);
    assert!(w.grad().is_none());
    scaled(&w, 0.125).backward().unwrap();
    assert_eq!((values(&w), kept(&attached)), (vec![-0.625, 0.375, -0.375], vec![0.125; 3]));
    // The rows of a sparse one, where they repeat, by their sum.
    let table = Tensor::zeros(DType::F32, (3, 1)).parameter().unwrap();
    let clip = InBackward {
        clip_value: Some(1.5),
        ..InBackward::default()
    };
    optimizer_in_backward(Sgd::new(1.0), [&table], clip).unwrap();
    let ids = Tensor::from_vec(vec![2_i64, 0, 2], 3).unwrap();
    table.embedding(&ids).unwrap().sum().unwrap().backward().unwrap();
    assert_eq!(table.to_vec::<f32>().unwrap(), [-1.0, 0.0, -1.5]);
    assert!(matches!(attached.gradient(1).unwrap_err().kind(), ErrorKind::Argument { .. }));
}

#[test]
fn twenty_iterations_agree_to_the_bit() {
    let rules: [(OptimizerSpec, bool); 7] = [
        (Sgd::new(0.1).momentum(0.9).into(), false),
        (Adam::new(0.05).into(), false),
        (Adagrad::new(0.1).into(), false),
        (Sgd::new(0.1).into(), true),
        (Adagrad::new(0.1).into(), true),
        (SparseAdam::new(0.05).into(), true),
        (Sgd::new(0.1).momentum(0.9).into(), true),
    ];
    for (spec, sparse) in rules {
        let table = || numbers(&[7, 3], 5).parameter().unwrap();
        let (ours, plain) = ([table(), table()], [table(), table()]);
        attach(spec.clone(), &ours);
        let mut optimizer = Optimizer::new(spec, plain.to_vec()).unwrap();
        for batch in 0..20 {
            let loss = |[a, b]: [&Tensor; 2]| {
                let of = |t: &Tensor, row: i64| {
                    let rows = Tensor::from_vec(vec![row % 7, (row * 3) % 7, row % 7], 3).unwrap();
                    let used = if sparse { t.embedding(&rows).unwrap() } else { t.tanh().unwrap() };
                    (&used * &used).unwrap().sum().unwrap()
                };
                (of(a, batch) + of(b, batch + 1)).unwrap()
            };
            loss(ours.each_ref()).backward().unwrap();
            loss(plain.each_ref()).backward().unwrap();
            assert_eq!(plain[0].grad().unwrap().is_sparse(), sparse);
            step(&mut optimizer);
            equal(&ours, &plain);
        }
    }
}

#[test]
fn state_goes_to_a_checkpoint_and_back() {
    let (a, b) = (parameter(&[1.0, 2.0]), parameter(&[1.0, 2.0]));
    let first = attach(Adam::new(0.1), [&a]);
    let turn = |p: &Tensor, factor: f64| (p * &vector(&[factor, -factor])).unwrap().sum().unwrap().backward().unwrap();
    turn(&a, 1.0);
    let mut second = attach(Adam::new(0.1), [&b]);
    b.leaf().unwrap().set_data(a.data().to_contiguous()).unwrap();
    second.load_state(0, first.state(0).unwrap().unwrap()).unwrap();
    for factor in [2.0, -0.3, 0.7] {
        turn(&a, factor);
        turn(&b, factor);
        equal([&a], [&b]);
    }
    let wrong = crate::optim::ParameterState::from_parts(vec![("steps".into(), 1.0)], vec![]);
    assert!(matches!(
        second.load_state(0, wrong).unwrap_err().kind(),
        ErrorKind::Argument { .. }
    ));
    turn(&a, 1.0);
    turn(&b, 1.0);
    equal([&a], [&b]);
}

#[test]
fn updates_are_in_place_and_leaks_there_are_none() {
    let w = numbers(&[4, 4], 1).parameter().unwrap();
    let mut attached = attach(Sgd::new(0.1).momentum(0.9), [&w]);
    let place = |w: &Tensor| match w.data() {
        Data::F64(array) => array.as_ptr() as usize,
        other => panic!("{other:?}"),
    };
    let before = place(&w);
    for _ in 0..3 {
        let h = numbers(&[2, 4], 2).matmul(&w).unwrap().matmul(&w).unwrap();
        h.sum().unwrap().backward().unwrap();
        assert_eq!(place(&w), before);
    }
    // Who holds a version keeps it.
    let held = w.data();
    scaled(&w, 1.0).backward().unwrap();
    assert_ne!(place(&w), before);
    drop(held);
    attached.set_lr(0.2).unwrap();
    drop(attached);
    // The leaf keeps its optimizer, which doesn't keep the leaf.
    let weak = Arc::downgrade(w.leaf().unwrap());
    drop(w);
    assert!(weak.upgrade().is_none());
}

#[test]
fn a_failing_update_ends_the_backward_and_says_what_was_updated() {
    let p = |name: &str| {
        let p = Tensor::zeros(DType::F64, (3, 1)).parameter().unwrap();
        p.leaf().unwrap().set_name(name);
        p
    };
    let (early, table, late) = (p("early"), p("table"), p("late"));
    attach(Adam::new(0.1), [&early, &table, &late]);
    let rows = Tensor::from_vec(vec![1_i64], 1).unwrap();
    // Gradients come from the last operation to the first.
    let a = late.exp().unwrap().sum().unwrap();
    let b = table.embedding(&rows).unwrap().sum().unwrap();
    let c = early.exp().unwrap().sum().unwrap();
    let error = backward(&[a, b, c], false).unwrap_err();
    match error.kind() {
        ErrorKind::InBackward {
            optimizer,
            parameter,
            updated,
            ..
        } => {
            assert_eq!((optimizer.as_str(), parameter.as_str()), ("Adam", "parameter 1 (`table`)"));
            assert_eq!(updated, &["`early`"]);
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(error.root(), ErrorKind::GradientKind { parameter: 1, .. }));
    assert!(error.to_string().contains("sparse"), "{error}");
    let moved = |p: &Tensor| values(p).iter().any(|&x| x != 0.0);
    assert_eq!((moved(&early), moved(&table), moved(&late)), (true, false, false));
}

#[test]
fn backwards_of_several_threads_lose_nothing() {
    let w = parameter(&[0.0, 0.0]);
    attach(Sgd::new(1.0), [&w]);
    let begin = Barrier::new(4);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (w, begin) = (&w, &begin);
            scope.spawn(move || {
                begin.wait();
                for _ in 0..200 {
                    scaled(w, f64::from(thread)).backward().unwrap();
                }
            });
        }
    });
    assert_eq!(values(&w), [-1200.0, -1200.0]);
    assert!(w.grad().is_none());
    assert_eq!(w.leaf().unwrap().version(), 800);
}

#[test]
fn hooks_of_others_see_the_gradient_before_and_none_after() {
    let w = parameter(&[1.0]);
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let note = |seen: &Arc<std::sync::Mutex<Vec<bool>>>| {
        let seen = Arc::clone(seen);
        move |_: &Tensor, slot: &mut Option<Gradient>| {
            lock(&seen).push(slot.is_some());
            Ok(())
        }
    };
    let _before = w.register_post_accumulate_hook(note(&seen)).unwrap();
    attach(Sgd::new(0.5), [&w]);
    let _after = w.register_post_accumulate_hook(note(&seen)).unwrap();
    // It adds to what is there, as any backward does.
    w.leaf().unwrap().accumulate_grad(Gradient::Dense(vector(&[1.0]).data())).unwrap();
    scaled(&w, 1.0).backward().unwrap();
    assert_eq!((lock(&seen).clone(), values(&w)), (vec![true, false], vec![0.0]));
}
