//! Parameters on a GPU.

use rankgrad_cuda_fake as fake;
use serde_json::json;

use super::contract::SignDescent;
use crate::ErrorKind;
use crate::optim::*;
use crate::tensor::device::testing::{device, is_real};
use crate::tensor::{DType, Data, Device, Gradient, RowSparse, Tensor};

fn tensor(values: &[f64]) -> Tensor {
    Tensor::from_vec(values.to_vec(), [values.len()]).unwrap()
}

fn dense(values: &[f64]) -> Gradient {
    Gradient::Dense(tensor(values).data())
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_vec().unwrap()
}

/// Parameters of lengths 1 to `n` on a device, and here.
fn parameters(n: usize, device: Device) -> [Vec<Tensor>; 2] {
    let made = |device: Device| {
        let one = |i: usize| tensor(&vec![i as f64 * 0.25; i]).to(device).unwrap().parameter().unwrap();
        (1..=n).map(one).collect()
    };
    [made(device), made(Device::Cpu)]
}

fn gradients(parameters: &[Tensor], seed: usize) -> Vec<Option<Gradient>> {
    let one = |(i, p): (usize, &Tensor)| Some(dense(&(0..p.len()).map(|k| ((k + i + seed) % 7) as f64 - 3.0).collect::<Vec<_>>()));
    parameters.iter().enumerate().map(one).collect()
}

#[test]
fn many_small_parameters_are_one_launch() {
    let (device, _turn) = device();
    let [on_gpu, here] = parameters(300, device);
    let mut optimizers = [&on_gpu, &here].map(|p| Optimizer::new(Adam::new(0.1), p.clone()).unwrap());
    for step in 0..3 {
        let gradients = gradients(&here, step);
        let [a, b] = optimizers.each_mut().map(|o| {
            let before = fake::launches();
            let checked = o.check(gradients.clone(), Norm::Two).unwrap();
            let reports = o.apply(checked).unwrap();
            (reports, fake::launches() - before)
        });
        assert_eq!(a.0, b.0);
        // The first step makes the state, too: by copies of zeros, without a kernel.
        assert!(is_real() || (a.1, b.1) == (1, 0), "{} launches", a.1);
    }
    assert!(on_gpu.iter().zip(&here).all(|(p, q)| values(p) == values(q)));
    assert!(on_gpu.iter().all(|p| p.device() == device));
}

#[test]
fn who_holds_values_keeps_them() {
    let (device, _turn) = device();
    let p = tensor(&[1.0, 2.0]).to(device).unwrap().parameter().unwrap();
    let mut optimizer = Optimizer::new(Sgd::new(0.5).momentum(0.5), vec![p.clone()]).unwrap();
    let held = p.data();
    let report = optimizer.step_one(0, dense(&[1.0, -1.0])).unwrap();
    assert_eq!((report.version, report.in_place), (1, false));
    assert_eq!(values(&Tensor::from_data(held.clone())), [1.0, 2.0]);
    let state = optimizer.state(0).unwrap().clone();
    let report = optimizer.step_one(0, dense(&[1.0, -1.0])).unwrap();
    assert_eq!((report.version, report.in_place), (2, true));
    assert_eq!(values(&p), [-0.25, 3.25]);
    // The state that was looked at stays, too.
    let buffer = state.array("momentum_buffer").unwrap().to(Device::Cpu).unwrap();
    assert_eq!(values(&Tensor::from_data(buffer)), [1.0, -1.0]);
    drop(held);
}

#[test]
fn rows_that_are_not_touched_stay() {
    let (device, _turn) = device();
    let made = |device| {
        Tensor::from_vec((0..20).map(f64::from).collect(), [5, 4])
            .unwrap()
            .to(device)
            .unwrap()
            .parameter()
            .unwrap()
    };
    let rows = RowSparse::new(vec![3, 1, 3], Tensor::ones(DType::F64, [3, 4]).data(), vec![5, 4]).unwrap();
    let [p, q] = [made(device), made(Device::Cpu)];
    let held = p.data();
    for (p, hold) in [(&p, true), (&q, false)] {
        let mut optimizer = Optimizer::new(SparseAdam::new(0.1), vec![p.clone()]).unwrap();
        for step in 0..3 {
            let report = optimizer.step_one(0, Gradient::Sparse(rows.clone())).unwrap();
            assert_eq!((report.rows, report.in_place), (Some(2), !(hold && step == 0)));
        }
    }
    assert_eq!(values(&p), values(&q));
    assert_eq!(values(&Tensor::from_data(held)), (0..20).map(f64::from).collect::<Vec<_>>());
}

#[test]
fn gradients_may_be_on_the_gpu() {
    let (device, _turn) = device();
    let [on_gpu, here] = parameters(40, device);
    let mut optimizers = [&on_gpu, &here].map(|p| Optimizer::new(AdamW::new(0.1), p.clone()).unwrap());
    for norm in [Norm::One, Norm::Two, Norm::Inf] {
        let mut given = gradients(&here, 1);
        given[7] = None;
        let [a, b] = optimizers.each_mut().map(|o| {
            let place = o.parameters().next().unwrap().device();
            let moved = given.iter().map(|g| g.as_ref().map(|g| g.to(place).unwrap())).collect();
            let mut checked = o.check(moved, norm).unwrap();
            let norms = checked.norms().unwrap().to_vec();
            checked.scale(0.3).unwrap();
            checked.clamp(0.5).unwrap();
            assert!(checked.not_finite().unwrap().is_empty());
            (norms, o.apply(checked).unwrap())
        });
        assert_eq!(a, b);
    }
    assert!(on_gpu.iter().zip(&here).all(|(p, q)| values(p) == values(q)));
    let mut bad = gradients(&here, 1);
    bad[3] = Some(dense(&[1.0, f64::NAN, 0.0, f64::INFINITY]).to(device).unwrap());
    assert_eq!(optimizers[0].check(bad, Norm::Two).unwrap().not_finite().unwrap(), [3]);
    let mut sum = dense(&[1.0, 2.0]).to(device).unwrap();
    sum.accumulate(dense(&[0.5, 0.25])).unwrap();
    sum.accumulate(Gradient::Dense(tensor(&[1.0, 1.0]).data()).to(device).unwrap())
        .unwrap();
    sum.scale(2.0).unwrap();
    assert_eq!(sum.device(), device);
    let Gradient::Dense(sum) = sum.to(Device::Cpu).unwrap() else {
        panic!("it is dense")
    };
    assert_eq!(values(&Tensor::from_data(sum)), [5.0, 6.5]);
}

#[test]
fn state_goes_to_a_gpu_and_back() {
    let (device, _turn) = device();
    let [on_gpu, here] = parameters(5, device);
    let mut optimizers = [&on_gpu, &here].map(|p| Optimizer::new(RmsProp::new(0.1).momentum(0.9), p.clone()).unwrap());
    for optimizer in &mut optimizers {
        let checked = optimizer.check(gradients(&here, 2), Norm::Two).unwrap();
        optimizer.apply(checked).unwrap();
    }
    // Each goes on from what the other one kept.
    for place in 0..5 {
        let states = [1, 0].map(|other: usize| optimizers[other].saved_state(place).unwrap());
        for (optimizer, state) in optimizers.iter_mut().zip(states) {
            optimizer.load_state(place, state).unwrap();
        }
    }
    for optimizer in &mut optimizers {
        let checked = optimizer.check(gradients(&here, 3), Norm::Two).unwrap();
        optimizer.apply(checked).unwrap();
    }
    assert!(on_gpu.iter().zip(&here).all(|(p, q)| values(p) == values(q)));
}

/// A parameter's values, the arrays of its state, and the numbers.
type Everything = (Vec<f64>, Vec<Vec<f64>>, Vec<f64>);

fn everything(optimizer: &Optimizer, parameters: &[Tensor]) -> Vec<Everything> {
    let one = |(place, p): (usize, &Tensor)| {
        let state = optimizer.state(place);
        let array = |data: &Data| values(&Tensor::from_data(data.to(Device::Cpu).unwrap()));
        let arrays = state.iter().flat_map(|state| state.arrays().map(|(_, data)| array(data))).collect();
        let scalars = state.iter().flat_map(|state| state.scalars().map(|(_, x)| x)).collect();
        (values(p), arrays, scalars)
    };
    parameters.iter().enumerate().map(one).collect()
}

/// Steps in which calls of the driver fail one after the other. Only rules whose last launch is the only one that is seen come through it.
fn failing(spec: impl Into<OptimizerSpec>, parameters: Vec<Tensor>) {
    let mut optimizer = Optimizer::new(spec.into(), parameters.clone()).unwrap();
    let mut tried = 0;
    for call in [
        "cuMemAlloc_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuStreamSynchronize",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuCtxSetCurrent",
    ] {
        for nth in 0..200 {
            let (before, come) = (everything(&optimizer, &parameters), fake::fault_count());
            let first = optimizer.state(0).is_none();
            // Half of them out of place.
            let held: Vec<_> = parameters.iter().take(3).map(Tensor::data).collect();
            let gradients = (parameters.iter().enumerate())
                .map(|(i, p)| Tensor::from_vec((0..p.len()).map(|k| ((k + i + nth) % 7) as f64 - 3.0).collect(), p.shape()).unwrap())
                .map(|g| Some(Gradient::Dense(g.data())))
                .collect();
            fake::fail(call, nth, 999);
            let checked = optimizer.check(gradients, Norm::Two);
            let result = checked.and_then(|checked| optimizer.apply(checked));
            fake::clear_failures();
            let failed = fake::fault_count() > come;
            if let (true, Err(error)) = (failed, result) {
                tried += 1;
                assert!(matches!(error.kind(), ErrorKind::Cuda { what } if what.contains("999")), "{error}");
                let now = everything(&optimizer, &parameters);
                assert!(now.iter().zip(&before).all(|(now, before)| now.0 == before.0), "{call} {nth}");
                // States may be made by a step that fails.
                assert!(first || now == before, "{call} {nth}");
            }
            drop(held);
            if !failed {
                break;
            }
        }
    }
    assert!(tried > 10, "{tried}");
    drop((optimizer, parameters));
    assert_eq!(fake::counts(), fake::Counts::default());
}

#[test]
fn a_step_that_fails_changes_nothing() {
    let (device, _turn) = device();
    if is_real() {
        println!("skipped: only the fake driver fails on purpose");
        return;
    }
    let [on_gpu, _] = parameters(6, device);
    failing(Adam::new(0.1), on_gpu);
    let [on_gpu, _] = parameters(6, device);
    failing(Lamb::new(0.1), on_gpu);
    let matrix = |(rows, columns): (usize, usize)| {
        let values = (0..rows * columns).map(|i| i as f64 * 0.25).collect();
        Tensor::from_vec(values, [rows, columns])
            .unwrap()
            .to(device)
            .unwrap()
            .parameter()
            .unwrap()
    };
    // No array of them stays behind.
    let matrices = Vec::from([(1, 1), (2, 3), (3, 2), (4, 4), (5, 1), (0, 2)].map(matrix));
    failing(Muon::new(0.1).ns_steps(2), matrices);
}

/// Some steps of a parameter on a GPU, and of one here.
fn steps_agree(spec: &OptimizerSpec, dtype: DType, shape: &[usize], device: Device) {
    let n: usize = shape.iter().product();
    let tensor = |of: &dyn Fn(usize) -> f64| Tensor::from_vec((0..n).map(of).collect(), shape).unwrap().cast(dtype).unwrap();
    let made = |device| tensor(&|i| 0.25 * i as f64 - 1.0).to(device).unwrap().parameter().unwrap();
    let both = [device, Device::Cpu].map(made);
    let mut optimizers = both.each_ref().map(|p| Optimizer::new(spec.clone(), vec![p.clone()]).unwrap());
    for step in 0..3 {
        let gradient = tensor(&|i| ((i * 7 + step) % 5) as f64 - 1.5);
        for optimizer in &mut optimizers {
            optimizer.step_one(0, Gradient::Dense(gradient.data())).unwrap();
        }
    }
    let told = |p: &Tensor, optimizer: &Optimizer| {
        let state = optimizer.saved_state(0).unwrap();
        let arrays = state.arrays().map(|(name, data)| {
            let here = Tensor::from_data(data.to(Device::Cpu).unwrap());
            (name.to_owned(), here.shape(), values(&here.cast(DType::F64).unwrap()))
        });
        let scalars: Vec<_> = state.scalars().map(|(name, value)| (name.to_owned(), value)).collect();
        (values(&p.cast(DType::F64).unwrap()), arrays.collect::<Vec<_>>(), scalars)
    };
    let [a, b] = [0, 1].map(|i| told(&both[i], &optimizers[i]));
    assert_eq!(a, b, "{} {dtype} {shape:?}", spec.name());
    assert_eq!(both[0].device(), device);
}

#[test]
fn a_rule_without_a_kernel_runs_here() {
    let (device, _turn) = device();
    steps_agree(&SignDescent { lr: 0.1 }.into(), DType::F64, &[3, 4], device);
}

#[test]
fn muon_has_the_bits_of_here() {
    let (device, _turn) = device();
    let specs = [
        json!({}),
        json!({"lr": 0.3, "nesterov": false, "ns_steps": 2, "maximize": true, "adjust_lr_fn": "match_rms_adamw"}),
        json!({"ns_steps": 0, "eps": 100.0}),
    ];
    for spec in specs.map(|options| OptimizerSpec::from_json("Muon", &options).unwrap()) {
        for shape in [&[1, 1][..], &[3, 4], &[70, 9], &[9, 70], &[66, 65], &[0, 3]] {
            for dtype in [DType::F32, DType::F64] {
                steps_agree(&spec, dtype, shape, device);
            }
        }
    }
}

#[test]
fn many_matrices_are_as_many_launches_as_one() {
    let (device, _turn) = device();
    for count in [1, 100] {
        let made = |device: Device| -> Vec<Tensor> {
            let one = |i: usize| Tensor::from_vec(vec![0.5; 3 * (i % 5 + 1)], [3, i % 5 + 1]).unwrap();
            (0..count).map(|i| one(i).to(device).unwrap().parameter().unwrap()).collect()
        };
        let both = [device, Device::Cpu].map(made);
        for (p, launches) in both.iter().zip([3 + 3 * 4 + 1, 0]) {
            let mut optimizer = Optimizer::new(Muon::new(0.1).ns_steps(4), p.clone()).unwrap();
            let gradient = |p: &Tensor| (0..p.len()).map(|k| (k % 7) as f64 - 3.0).collect();
            let gradient = |p: &Tensor| Tensor::from_vec(gradient(p), p.shape()).unwrap().data().into();
            let checked = optimizer.check(p.iter().map(|p| Some(gradient(p))).collect(), Norm::Two).unwrap();
            let before = fake::launches();
            optimizer.apply(checked).unwrap();
            assert!(is_real() || fake::launches() - before == launches, "{}", fake::launches() - before);
        }
        assert!(both[0].iter().zip(&both[1]).all(|(p, q)| values(p) == values(q)));
    }
}

#[test]
fn adafactor_has_the_bits_of_here() {
    let (device, _turn) = device();
    let specs = [json!({}), json!({"lr": 0.3, "weight_decay": 0.1, "maximize": true})];
    for spec in specs.map(|options| OptimizerSpec::from_json("Adafactor", &options).unwrap()) {
        for shape in [&[][..], &[9], &[3, 4], &[2, 3, 5], &[2, 0, 5], &[2, 70, 130]] {
            for dtype in [DType::F32, DType::F64] {
                steps_agree(&spec, dtype, shape, device);
            }
        }
    }
}

#[test]
fn tensors_on_a_gpu_are_used_like_others() {
    let (device, _turn) = device();
    let x = tensor(&[1.0, 2.0]).to(device).unwrap();
    assert_eq!(format!("{x:?}"), "Tensor(f64, [2], cuda:0)");
    // What has no kernel runs here, and its result is here.
    assert_eq!(x.argmax(0).unwrap().device(), Device::Cpu);
    let error = x.data().view::<f64>().unwrap_err();
    assert!(
        error.to_string().contains("cuda:0") && error.to_string().contains("to(Device::Cpu)"),
        "{error}"
    );
    let error = tensor(&[1.0]).to(Device::Cuda(99)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Cuda { .. }), "{error}");
    assert_eq!(
        x.item::<f64>().unwrap_err().kind(),
        tensor(&[1.0, 2.0]).item::<f64>().unwrap_err().kind()
    );
    // Gradients go the way that the values came.
    let w = tensor(&[1.0, 2.0]).parameter().unwrap();
    w.to(device).unwrap().to(Device::Cpu).unwrap().sum().unwrap().backward().unwrap();
    let grad = w.grad().unwrap().to(Device::Cpu).unwrap().to_dense().unwrap();
    assert_eq!(values(&Tensor::from_data(grad)), [1.0, 1.0]);
}
