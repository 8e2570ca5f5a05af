//! `+ - * /` and unary `-`. They return `Result<Tensor>`, as shapes and dtypes may not fit.

use std::ops::{Add, Div, Mul, Neg, Sub};

use crate::Result;
use crate::tensor::Tensor;

macro_rules! operator {
    ($trait:ident, $method:ident, $scalar:ident) => {
        operator!(@pair $trait, $method, Tensor, Tensor);
        operator!(@pair $trait, $method, Tensor, &Tensor);
        operator!(@pair $trait, $method, &Tensor, Tensor);
        operator!(@pair $trait, $method, &Tensor, &Tensor);
        operator!(@scalar $trait, $method, $scalar, Tensor);
        operator!(@scalar $trait, $method, $scalar, &Tensor);
    };
    (@pair $trait:ident, $method:ident, $left:ty, $right:ty) => {
        impl $trait<$right> for $left {
            type Output = Result<Tensor>;

            fn $method(self, other: $right) -> Result<Tensor> {
                Tensor::$method(&self, &other)
            }
        }
    };
    (@scalar $trait:ident, $method:ident, $scalar:ident, $left:ty) => {
        impl $trait<f64> for $left {
            type Output = Result<Tensor>;

            fn $method(self, scalar: f64) -> Result<Tensor> {
                self.$scalar(scalar)
            }
        }
    };
}

operator!(Add, add, add_scalar);
operator!(Sub, sub, sub_scalar);
operator!(Mul, mul, mul_scalar);
operator!(Div, div, div_scalar);

impl Neg for &Tensor {
    type Output = Result<Tensor>;

    fn neg(self) -> Result<Tensor> {
        Tensor::neg(self)
    }
}

impl Neg for Tensor {
    type Output = Result<Tensor>;

    fn neg(self) -> Result<Tensor> {
        Tensor::neg(&self)
    }
}
