//! Construction, sharing, leaves, row-sparse gradients.

use ndarray::{Array2, array};

use crate::ErrorKind;
use crate::tensor::{DType, Data, Device, Element, Gradient, Leaf, RowSparse, Tensor};

fn vector(values: &[f64]) -> Tensor {
    Tensor::from_vec(values.to_vec(), values.len()).unwrap()
}

#[test]
fn tensors_and_leaves_cross_threads() {
    fn check<T: Send + Sync>() {}
    check::<Tensor>();
    check::<Leaf>();
    check::<Gradient>();
    check::<crate::tensor::HookHandle>();
}

#[test]
fn arrays_go_in_and_out_without_a_copy() {
    let array = array![[1.0, 2.0], [3.0, 4.0]];
    let start = array.as_ptr();
    let x = Tensor::from_array(array);
    assert_eq!(
        (x.dtype(), x.shape(), x.ndim(), x.len(), x.device()),
        (DType::F64, vec![2, 2], 2, 4, Device::Cpu)
    );
    assert_eq!(x.array::<f64>().unwrap().as_ptr(), start);
    let back = x.into_array::<f64>().unwrap();
    assert_eq!(back.as_ptr(), start);

    let w = Tensor::from_array(back).parameter().unwrap();
    assert_eq!(w.array::<f64>().unwrap().as_ptr(), start);
    assert_eq!(w.into_array::<f64>().unwrap().as_ptr(), start);
}

#[test]
fn bad_construction_is_an_error() {
    let error = Tensor::from_vec(vec![1.0; 3], (2, 2)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Shape { .. }), "{error}");
    assert!(Tensor::from_vec(vec![1.0; 3], [usize::MAX, usize::MAX]).is_err());
    assert!(Tensor::from_vec(Vec::<f64>::new(), [usize::MAX, 0, usize::MAX]).is_err());
    assert!(vector(&[1.0, 2.0]).item::<f64>().is_err());
    assert!(matches!(vector(&[1.0]).item::<f32>().unwrap_err().kind(), ErrorKind::DType { .. }));
}

#[test]
fn views_share_the_storage() {
    let x = Tensor::from_array(Array2::<f64>::zeros((4, 6)));
    let same = |y: &Tensor| y.data().shares_storage(&x.data());
    assert!(same(&x.transpose(0, 1).unwrap()));
    assert!(same(&x.permute(&[1, 0]).unwrap()));
    assert!(same(&x.reshape(&[3, -1]).unwrap()));
    assert!(same(&x.slice(1, 0, 3, 2).unwrap()));
    assert!(same(&x.split(&[2, 4], 1).unwrap()[0]));
    assert!(same(&x.detach()));
    assert!(!same(&x.transpose(0, 1).unwrap().reshape(&[24]).unwrap()));
}

#[test]
fn an_update_is_in_place_unless_someone_holds_the_storage() {
    let w = vector(&[1.0, 2.0]).parameter().unwrap();
    let leaf = w.leaf().unwrap();
    let bump = |data: &mut Data| {
        f64::peek_mut(data)?.mapv_inplace(|x| x + 1.0);
        Ok(())
    };
    assert!(leaf.update(bump).unwrap().1.in_place);
    let held = w.data();
    let view = w.slice(0, 0, 1, 1).unwrap();
    assert!(!leaf.update(bump).unwrap().1.in_place);
    assert!(leaf.update(bump).unwrap().1.in_place, "the new storage is free");
    assert_eq!(held.view::<f64>().unwrap().as_slice(), Some([2.0, 3.0].as_slice()));
    assert_eq!(view.to_vec::<f64>().unwrap(), [2.0]);
    assert_eq!(w.to_vec::<f64>().unwrap(), [4.0, 5.0]);
    assert_eq!(leaf.version(), 3);
    let failed = leaf.update(|data| -> crate::Result<()> {
        *data = Data::zeros(DType::F64, &[7]);
        Err(crate::Error::user("stop"))
    });
    assert!(failed.is_err());
    assert_eq!(leaf.version(), 4, "values may have changed");
}

#[test]
fn a_failed_update_out_of_place_changes_nothing() {
    let w = vector(&[1.0, 2.0]).parameter().unwrap();
    let leaf = w.leaf().unwrap();
    let held = w.data();
    let failed = leaf.update(|data| -> crate::Result<()> {
        f64::peek_mut(data)?.fill(9.0);
        Err(crate::Error::user("stop"))
    });
    assert_eq!(failed.unwrap_err().to_string(), "stop");
    assert!(w.data().shares_storage(&held));
    assert_eq!((w.to_vec::<f64>().unwrap(), leaf.version()), (vec![1.0, 2.0], 0));
    assert!(
        leaf.update(|data| {
            *data = Data::zeros(DType::F32, &[2]);
            Ok(())
        })
        .is_err()
    );
    assert_eq!(w.to_vec::<f64>().unwrap(), [1.0, 2.0]);
}

#[test]
fn set_data_checks_and_counts() {
    let w = vector(&[1.0, 2.0]).parameter().unwrap();
    let leaf = w.leaf().unwrap();
    assert_eq!(leaf.set_data(vector(&[3.0, 4.0]).data()).unwrap(), 1);
    assert!(matches!(
        leaf.set_data(vector(&[3.0]).data()).unwrap_err().kind(),
        ErrorKind::Shape { .. }
    ));
    let single = Data::zeros(DType::F32, &[2]);
    assert!(matches!(leaf.set_data(single).unwrap_err().kind(), ErrorKind::DType { .. }));
    assert_eq!((leaf.version(), w.to_vec::<f64>().unwrap()), (1, vec![3.0, 4.0]));
    leaf.set_name("w");
    assert_eq!(leaf.name(), Some("w"));
    assert_ne!(leaf.id(), vector(&[1.0]).parameter().unwrap().leaf().unwrap().id());
}

#[test]
fn a_graph_keeps_the_version_it_saw() {
    let w = vector(&[2.0]).parameter().unwrap();
    let loss = (&w * &w).unwrap().sum().unwrap();
    w.leaf().unwrap().set_data(vector(&[100.0]).data()).unwrap();
    loss.backward().unwrap();
    assert_eq!(
        Tensor::from_data(w.grad().unwrap().to_dense().unwrap()).to_vec::<f64>().unwrap(),
        [4.0]
    );
}

fn sparse(rows: &[i64], values: &[f64]) -> RowSparse {
    RowSparse::new(
        rows.to_vec(),
        Tensor::from_vec(values.to_vec(), (rows.len(), 1)).unwrap().data(),
        vec![4, 1],
    )
    .unwrap()
}

#[test]
fn row_sparse_gradients_add_up() {
    let dense = |gradient: &Gradient| Tensor::from_data(gradient.to_dense().unwrap()).to_vec::<f64>().unwrap();
    let mut sum = Gradient::Sparse(sparse(&[2, 0, 2], &[1.0, 2.0, 3.0]));
    assert_eq!(sum.bytes(), 3 * 16);
    sum.accumulate(Gradient::Sparse(sparse(&[3], &[5.0]))).unwrap();
    assert!(sum.is_sparse());
    assert_eq!(dense(&sum), [2.0, 0.0, 4.0, 5.0]);
    sum.scale(2.0).unwrap();
    sum.accumulate(Gradient::Dense(Tensor::ones(DType::F64, (4, 1)).data())).unwrap();
    assert!(!sum.is_sparse());
    sum.accumulate(Gradient::Sparse(sparse(&[1, 1], &[1.0, 1.0]))).unwrap();
    assert_eq!(dense(&sum), [5.0, 3.0, 9.0, 11.0]);
    assert!(sum.accumulate(Data::zeros(DType::F64, &[4]).into()).is_err());
    assert!(sum.accumulate(Data::zeros(DType::F32, &[4, 1]).into()).is_err());
    assert!(
        sum.accumulate(Gradient::Sparse(RowSparse {
            rows: vec![9],
            ..sparse(&[1], &[1.0])
        }))
        .is_err()
    );
}

#[test]
fn row_sparse_gradients_are_checked() {
    let values = || Data::zeros(DType::F64, &[2, 3]);
    assert!(RowSparse::new(vec![0, 1], values(), vec![4, 3]).is_ok());
    assert!(matches!(
        RowSparse::new(vec![0, 4], values(), vec![4, 3]).unwrap_err().kind(),
        ErrorKind::Index { index: 4, size: 4, .. }
    ));
    assert!(RowSparse::new(vec![0, -1], values(), vec![4, 3]).is_err());
    assert!(RowSparse::new(vec![0], values(), vec![4, 3]).is_err());
    assert!(RowSparse::new(vec![0, 1], values(), vec![4, 2]).is_err());
    assert!(RowSparse::new(vec![0, 1], values(), vec![]).is_err());
    assert!(RowSparse::new(vec![], Data::zeros(DType::F64, &[]), vec![4]).is_err());
    assert!(RowSparse::new(vec![0, 1], Data::zeros(DType::I64, &[2, 3]), vec![4, 3]).is_err());
}

#[test]
fn accumulation_writes_in_place_only_where_nobody_looks() {
    let mut sum = Gradient::from(vector(&[1.0]).data());
    let before = sum.clone();
    sum.accumulate(vector(&[2.0]).data().into()).unwrap();
    let (Gradient::Dense(before), Gradient::Dense(after)) = (&before, &sum) else {
        panic!("dense")
    };
    assert_eq!((before.view::<f64>().unwrap()[0], after.view::<f64>().unwrap()[0]), (1.0, 3.0));
}
