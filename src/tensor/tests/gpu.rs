//! Operations on a GPU against those here, with their gradients.

use crate::Result;
use crate::tensor::device::testing::device;
use crate::tensor::{DType, Device, Reduction, Tensor};

/// A function by its name.
type Named = (&'static str, fn(&Tensor) -> Result<Tensor>);

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.cast(DType::F64).unwrap().to_vec().unwrap()
}

fn numbers(seed: usize, shape: &[usize], dtype: DType) -> Tensor {
    let n: usize = shape.iter().product();
    let elements = (0..n).map(|i| ((i * 37 + seed * 101) % 97) as f64 / 24.0 - 2.0).collect::<Vec<_>>();
    Tensor::from_vec(elements, shape).unwrap().cast(dtype).unwrap()
}

/// Results and gradients of a function of tensors, here and on a GPU, which it must come out on.
fn agree(name: &str, device: Device, dtype: DType, shapes: &[&[usize]], on_gpu: bool, f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let run = |places: &dyn Fn(usize) -> Device| {
        let inputs: Vec<Tensor> = shapes
            .iter()
            .enumerate()
            .map(|(i, shape)| numbers(i, shape, dtype).to(places(i)).unwrap().parameter().unwrap())
            .collect();
        let output = f(&inputs).unwrap_or_else(|e| panic!("{name}: {e}"));
        // Weights, so that not all gradients are one.
        let weights = numbers(9, &output.shape(), dtype);
        (&output * &weights).unwrap().sum().unwrap().backward().unwrap();
        let gradients: Vec<Vec<f64>> = inputs
            .iter()
            .map(|x| values(&Tensor::from_data(x.grad().unwrap().to(Device::Cpu).unwrap().to_dense().unwrap())))
            .collect();
        let devices: Vec<Device> = inputs.iter().map(|x| x.grad().unwrap().device()).collect();
        (values(&output), gradients, output.device(), devices)
    };
    let here = run(&|_| Device::Cpu);
    // All operands there, and only the first.
    for mixed in [false, true] {
        let place = |i: usize| if mixed && i > 0 { Device::Cpu } else { device };
        let there = run(&place);
        let near = |a: &[f64], b: &[f64]| {
            let bound = if dtype == DType::F32 { 1e-4 } else { 1e-11 };
            assert_eq!(a.len(), b.len(), "{name}");
            for (x, y) in a.iter().zip(b) {
                assert!(
                    (x - y).abs() <= bound * y.abs().max(1.0),
                    "{name} {dtype} mixed {mixed}: {x} and {y}"
                );
            }
        };
        near(&there.0, &here.0);
        there.1.iter().zip(&here.1).for_each(|(a, b)| near(a, b));
        if on_gpu {
            assert_eq!(there.2, device, "{name}");
            for (i, &found) in there.3.iter().enumerate() {
                assert_eq!(found, place(i), "{name}: gradient {i}");
            }
        }
    }
}

#[test]
fn operations_on_a_gpu_agree_with_those_here() {
    let (device, _turn) = device();
    for dtype in [DType::F32, DType::F64] {
        let unary: [Named; 12] = [
            ("neg", Tensor::neg),
            ("exp", Tensor::exp),
            ("tanh", Tensor::tanh),
            ("sigmoid", Tensor::sigmoid),
            ("relu", Tensor::relu),
            ("abs", Tensor::abs),
            ("add_scalar", |x| x.add_scalar(1.5)),
            ("sub_scalar", |x| x.sub_scalar(1.5)),
            ("mul_scalar", |x| x.mul_scalar(1.5)),
            ("div_scalar", |x| x.div_scalar(1.5)),
            ("square", |x| x.pow_scalar(2.0)),
            ("sqrt", |x| x.pow_scalar(2.0)?.add_scalar(0.5)?.sqrt()),
        ];
        for (name, f) in unary {
            agree(name, device, dtype, &[&[7, 5]], true, |x| f(&x[0]));
        }
        for (left, right) in [(&[4, 3][..], &[4, 3][..]), (&[4, 3], &[3]), (&[4, 1], &[2, 1, 3]), (&[], &[5])] {
            let pair = [left, right];
            agree("add", device, dtype, &pair, true, |x| x[0].add(&x[1]));
            agree("sub", device, dtype, &pair, true, |x| x[0].sub(&x[1]));
            agree("mul", device, dtype, &pair, true, |x| x[0].mul(&x[1]));
            agree("div", device, dtype, &pair, true, |x| {
                x[0].div(&x[1].pow_scalar(2.0)?.add_scalar(1.0)?)
            });
        }
        agree("matmul", device, dtype, &[&[5, 20], &[20, 18]], true, |x| x[0].matmul(&x[1]));
        agree("matmul of a stack", device, dtype, &[&[2, 3, 4], &[4, 5]], true, |x| {
            x[0].matmul(&x[1])
        });
        agree("sum", device, dtype, &[&[6, 50]], true, |x| x[0].sum());
        agree("mean over the last axis", device, dtype, &[&[6, 50]], true, |x| {
            x[0].mean_axes(&[1], false)
        });
        agree("sum over outer axes", device, dtype, &[&[3, 4, 5]], true, |x| {
            x[0].sum_axes(&[0, 2], true)
        });
        agree("reshape", device, dtype, &[&[3, 4]], true, |x| x[0].reshape(&[2, 6]));
        let ids = Tensor::from_vec(vec![3_i64, 0, 3], 3).unwrap();
        agree("embedding", device, dtype, &[&[5, 4]], false, |x| x[0].embedding(&ids));
        let targets = Tensor::from_vec(vec![2_i64, 0, 1, 1], 4).unwrap();
        for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
            agree("cross_entropy", device, dtype, &[&[4, 3]], false, |x| {
                x[0].cross_entropy_with(&targets, reduction)
            });
        }
        // What has no kernel runs here.
        agree("log", device, dtype, &[&[4]], false, |x| {
            x[0].pow_scalar(2.0)?.add_scalar(1.0)?.log()
        });
        agree("transpose", device, dtype, &[&[4, 3]], false, |x| x[0].transpose(0, 1));
    }
}

/// The arithmetic of functions is the same, to the bit.
#[test]
fn functions_on_a_gpu_have_the_bits_of_those_here() {
    let (device, _turn) = device();
    let special = [
        0.0,
        -0.0,
        1e-310,
        -1e-40,
        88.0,
        -103.5,
        709.7,
        -745.0,
        1e9,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
    ];
    for dtype in [DType::F32, DType::F64] {
        let spread = (0..4000).map(|i| f64::from(i - 2000) * 0.01);
        let x: Vec<f64> = special.into_iter().chain(spread).collect();
        let x = Tensor::from_vec(x.clone(), x.len()).unwrap().cast(dtype).unwrap();
        let functions: [Named; 5] = [
            ("exp", Tensor::exp),
            ("tanh", Tensor::tanh),
            ("sigmoid", Tensor::sigmoid),
            ("sqrt", Tensor::sqrt),
            ("relu", Tensor::relu),
        ];
        for (name, f) in functions {
            let bits = |x: &Tensor| values(&f(x).unwrap()).into_iter().map(f64::to_bits).collect::<Vec<_>>();
            let is_nan = |bits: u64| f64::from_bits(bits).is_nan();
            let (here, there) = (bits(&x), bits(&x.to(device).unwrap()));
            for (i, (&a, &b)) in here.iter().zip(&there).enumerate() {
                assert!(
                    a == b || is_nan(a) && is_nan(b),
                    "{name} {dtype} {i}: {:e} and {:e}",
                    f64::from_bits(a),
                    f64::from_bits(b)
                );
            }
        }
    }
}
