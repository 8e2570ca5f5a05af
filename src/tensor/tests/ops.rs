//! Values and errors of operations that the golden file doesn't hold.

use crate::ErrorKind;
use crate::tensor::{DType, Reduction, Tensor};

fn vector(values: &[f64]) -> Tensor {
    Tensor::from_vec(values.to_vec(), values.len()).unwrap()
}

fn ids(values: &[i64]) -> Tensor {
    Tensor::from_vec(values.to_vec(), values.len()).unwrap()
}

fn grad(x: &Tensor) -> Vec<f64> {
    Tensor::from_data(x.grad().unwrap().to_dense().unwrap()).to_vec().unwrap()
}

#[test]
fn errors_name_operation_and_shapes() {
    let (a, b) = (Tensor::zeros(DType::F64, (2, 3)), Tensor::zeros(DType::F64, (2, 4)));
    let text = a.add(&b).unwrap_err().to_string();
    assert!(text.contains("add") && text.contains("[2, 3]") && text.contains("[2, 4]"), "{text}");
    assert!(matches!(a.matmul(&b).unwrap_err().kind(), ErrorKind::Shape { op, .. } if op == "matmul"));
    assert!(matches!(
        a.add(&Tensor::zeros(DType::F32, (2, 3))).unwrap_err().kind(),
        ErrorKind::DType { .. }
    ));
    assert!(matches!(ids(&[1]).exp().unwrap_err().kind(), ErrorKind::DType { .. }));
    assert!(matches!(
        a.sum_axes(&[2], false).unwrap_err().kind(),
        ErrorKind::Axis { axis: 2, ndim: 2, .. }
    ));
    assert!(a.sum_axes(&[0, -2], false).is_err());
    assert!(a.reshape(&[4, -1]).is_err() && a.reshape(&[-1, -1]).is_err() && a.reshape(&[-2, 3]).is_err());
    assert!(a.permute(&[0]).is_err() && a.permute(&[0, 0]).is_err());
    assert!(a.broadcast_to((3, 3)).is_err() && a.broadcast_to(3).is_err());
    assert!(a.slice(0, None, None, 0).is_err());
    assert!(Tensor::concat::<Tensor>(&[], 0).is_err() && Tensor::concat(&[&a, &b], 0).is_err() && Tensor::stack(&[&a, &b], 0).is_err());
    assert!(a.split(&[1], 0).is_err());
    assert!(matches!(
        a.index_select(0, &ids(&[2])).unwrap_err().kind(),
        ErrorKind::Index { index: 2, size: 2, .. }
    ));
    assert!(a.embedding(&ids(&[-1])).is_err() && a.embedding(&vector(&[0.0])).is_err());
    assert!(a.cross_entropy(&ids(&[0, 3])).is_err() && a.cross_entropy(&ids(&[0])).is_err());
    assert!(Tensor::scalar(1.0).matmul(&a).is_err() && Tensor::scalar(1.0).cross_entropy(&ids(&[0])).is_err());
    let empty = Tensor::zeros(DType::F64, (0, 3));
    assert!(empty.max().is_err() && empty.logsumexp_axes(&[0], false).is_err() && empty.argmax(0).is_err());
}

#[test]
fn empty_tensors_pass_through() {
    let x = Tensor::zeros(DType::F64, (0, 3)).with_grad().unwrap();
    assert_eq!((&x + &vector(&[1.0, 2.0, 3.0])).unwrap().shape(), [0, 3]);
    let y = x.matmul(&Tensor::ones(DType::F64, (3, 2))).unwrap();
    assert_eq!(y.shape(), [0, 2]);
    y.softmax(1).unwrap().sum().unwrap().backward().unwrap();
    assert_eq!(x.grad().unwrap().shape(), [0, 3]);
    let inner = Tensor::zeros(DType::F64, (2, 0))
        .matmul(&Tensor::zeros(DType::F64, (0, 2)))
        .unwrap();
    assert_eq!(inner.to_vec::<f64>().unwrap(), [0.0; 4]);
    assert_eq!(x.sum_axes(&[0], true).unwrap().to_vec::<f64>().unwrap(), [0.0; 3]);
}

#[test]
fn slices_are_numpys() {
    let x = ids(&[0, 1, 2, 3, 4]);
    let take = |start: Option<i64>, end: Option<i64>, step| x.slice(0, start, end, step).unwrap().to_vec::<i64>().unwrap();
    assert_eq!(take(Some(-2), None, 1), [3, 4]);
    assert_eq!(take(Some(1), Some(100), 3), [1, 4]);
    assert_eq!(take(Some(3), Some(1), 1), [0; 0]);
    assert_eq!(take(Some(3), Some(0), -1), [3, 2, 1]);
    assert_eq!(take(Some(100), Some(-100), -2), [4, 2, 0]);
    assert_eq!(take(Some(0), Some(3), -1), [0; 0]);
    assert_eq!(take(Some(-1), Some(-3), -1), [4, 3]);
    let empty = x.slice(0, 0, 0, 1).unwrap();
    assert!(empty.slice(0, None, None, -1).unwrap().is_empty());
}

#[test]
fn comparisons_and_casts() {
    let (a, b) = (vector(&[1.0, 2.0, f64::NAN]), vector(&[1.0, 3.0, 0.0]));
    let bools = |x: crate::Result<Tensor>| x.unwrap().to_vec::<bool>().unwrap();
    assert_eq!(bools(a.eq(&b)), [true, false, false]);
    assert_eq!(bools(a.ne(&b)), [false, true, true]);
    assert_eq!(bools(a.lt(&b)), [false, true, false]);
    assert_eq!(bools(a.le(&b)), [true, true, false]);
    assert_eq!(bools(a.gt(&Tensor::scalar(1.5))), [false, true, false]);
    assert_eq!(bools(ids(&[1, 2]).ge(&ids(&[2, 2]))), [false, true]);
    assert_eq!(vector(&[-1.9, 2.5]).cast(DType::I64).unwrap().to_vec::<i64>().unwrap(), [-1, 2]);
    assert_eq!(ids(&[0, 2]).cast(DType::Bool).unwrap().to_vec::<bool>().unwrap(), [false, true]);
    assert_eq!(ids(&[1, 2, 3]).accuracy(&ids(&[1, 2, 4])).unwrap(), 2.0 / 3.0);
    assert_eq!(vector(&[1.0, f64::NAN, 3.0, f64::NAN]).argmax(0).unwrap().item::<i64>().unwrap(), 1);
    let x = Tensor::from_vec(vec![1.0, 5.0, 5.0, 4.0, 2.0, 4.0], (2, 3)).unwrap();
    assert_eq!(x.argmax(-1).unwrap().to_vec::<i64>().unwrap(), [1, 0]);
    assert_eq!(x.argmax(0).unwrap().to_vec::<i64>().unwrap(), [1, 0, 0]);
}

#[test]
fn ties_share_or_go_to_the_first() {
    let x = vector(&[3.0, 1.0, 3.0]).with_grad().unwrap();
    x.max().unwrap().backward().unwrap();
    assert_eq!(grad(&x), [0.5, 0.0, 0.5]);
    x.zero_grad();
    x.max_axes(&[0], false).unwrap().backward().unwrap();
    assert_eq!(grad(&x), [1.0, 0.0, 0.0]);
    let (a, b) = (vector(&[2.0]).with_grad().unwrap(), vector(&[2.0]).with_grad().unwrap());
    a.maximum(&b).unwrap().sum().unwrap().backward().unwrap();
    assert_eq!((grad(&a), grad(&b)), (vec![0.5], vec![0.5]));
}

#[test]
fn edges_of_the_domain() {
    let x = vector(&[0.0, 0.0]).with_grad().unwrap();
    let y = vector(&[0.0, 2.0]).with_grad().unwrap();
    x.pow(&y).unwrap().sum().unwrap().backward().unwrap();
    assert_eq!((grad(&x), grad(&y)), (vec![0.0, 0.0], vec![0.0, 0.0]));
    let big = vector(&[1000.0, -1000.0, 0.0]).with_grad().unwrap();
    assert_eq!(big.softplus().unwrap().to_vec::<f64>().unwrap()[..2], [1000.0, 0.0]);
    assert_eq!(big.sigmoid().unwrap().to_vec::<f64>().unwrap(), [1.0, 0.0, 0.5]);
    assert_eq!(big.logsumexp().unwrap().item::<f64>().unwrap(), 1000.0);
    assert_eq!(big.softmax(0).unwrap().to_vec::<f64>().unwrap(), [1.0, 0.0, 0.0]);
    assert!(vector(&[f64::NEG_INFINITY; 2]).logsumexp().unwrap().item::<f64>().unwrap() == f64::NEG_INFINITY);
    big.softplus().unwrap().sum().unwrap().backward().unwrap();
    assert_eq!(grad(&big), [1.0, 0.0, 0.5]);
    let relu = vector(&[f64::NAN, -1.0, 2.0]).relu().unwrap().to_vec::<f64>().unwrap();
    assert!(relu[0].is_nan() && relu[1..] == [0.0, 2.0]);
}

#[test]
fn losses_that_stay_as_they_are() {
    let x = Tensor::from_vec(vec![0.5, -1.0, 2.0, 0.0, 1.0, -2.0], (1, 3, 2)).unwrap();
    let targets = Tensor::from_vec(vec![2_i64, 0], (1, 2)).unwrap();
    let losses = x.cross_entropy_with(&targets, Reduction::None).unwrap();
    assert_eq!(losses.shape(), [1, 2]);
    let logs = x.log_softmax(1).unwrap().to_vec::<f64>().unwrap();
    assert_eq!(losses.to_vec::<f64>().unwrap(), [-logs[4], -logs[1]]);
    assert_eq!(
        vector(&[1.0, 2.0])
            .mse_with(&vector(&[3.0, 2.0]), Reduction::None)
            .unwrap()
            .to_vec::<f64>()
            .unwrap(),
        [4.0, 0.0]
    );
    assert_eq!(
        vector(&[1.0, 2.0]).nll(&Tensor::scalar(1_i64)).unwrap().item::<f64>().unwrap(),
        -2.0
    );
}

#[test]
fn long_sums_are_accurate_and_repeat() {
    let x = Tensor::full(DType::F32, 1_000_000, 0.1);
    let sum = x.sum().unwrap().item::<f32>().unwrap();
    assert!((f64::from(sum) - 1e6 * f64::from(0.1_f32)).abs() < 0.05, "{sum}");
    let turned = x.reshape(&[1000, 1000]).unwrap().transpose(0, 1).unwrap();
    assert_eq!(turned.sum().unwrap().item::<f32>().unwrap(), sum);
}

#[test]
fn concat_refuses_operands_of_other_dimensions() {
    let x = Tensor::from_vec(vec![1.0, 2.0], [2]).unwrap();
    let error = Tensor::concat(&[x, Tensor::scalar(1.0)], 0).unwrap_err();
    assert!(matches!(error.kind(), crate::ErrorKind::Shape { .. }), "{error}");
}

#[test]
fn gradients_of_nan_are_seen() {
    let x = vector(&[-1.0, 4.0]).parameter().unwrap();
    let y = x.log().unwrap().relu().unwrap();
    (&y * &y).unwrap().mean().unwrap().backward().unwrap();
    let seen = grad(&x);
    assert!(seen[0].is_nan() && seen[1].is_finite(), "{seen:?}");
    for larger in [true, false] {
        let (a, b) = (
            vector(&[f64::NAN, 1.0, 1.0, 2.0]).parameter().unwrap(),
            vector(&[1.0, f64::NAN, 2.0, 2.0]).parameter().unwrap(),
        );
        let one = if larger { a.maximum(&b) } else { a.minimum(&b) };
        one.unwrap().sum().unwrap().backward().unwrap();
        let (first, second) = if larger { (0.0, 1.0) } else { (1.0, 0.0) };
        assert_eq!(grad(&a), [1.0, 1.0, first, 0.5]);
        assert_eq!(grad(&b), [1.0, 1.0, second, 0.5]);
    }
}

#[test]
fn operands_without_elements_may_have_results_that_are_too_large() {
    let n = 1 << 31;
    let refused = |result: crate::Result<Tensor>| {
        let told = result.unwrap_err();
        assert!(matches!(told.kind(), ErrorKind::Argument { .. }), "{told}");
    };
    for n in [n, 1 << 33] {
        refused(Tensor::zeros(DType::F32, (n, 0)).matmul(&Tensor::zeros(DType::F32, (0, n))));
    }
    refused(Tensor::zeros(DType::F32, (2, n, 0)).matmul(&Tensor::zeros(DType::F32, (0, n))));
    let flat = Tensor::zeros(DType::F64, (n, 0, n));
    refused(flat.sum_axes(&[1], false));
    refused(flat.mean_axes(&[1], true));
    assert_eq!(flat.sum().unwrap().item::<f64>().unwrap(), 0.0);
    assert_eq!(flat.sum_axes(&[0], false).unwrap().shape(), [0, n]);
}

#[test]
fn labels_are_compared_in_one_shape() {
    let labels = ids(&[0, 1]);
    assert_eq!(labels.accuracy(&ids(&[0, 1])).unwrap(), 1.0);
    let told = labels.accuracy(&labels.reshape(&[2, 1]).unwrap()).unwrap_err();
    assert!(matches!(told.kind(), ErrorKind::Shape { op, .. } if op == "accuracy"), "{told}");
}
