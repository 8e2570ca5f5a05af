//! Rules behind one type, whatever their options and the dtype of the parameter.

use std::any::Any;

use serde_json::Value;

use super::{Form, Rows, Rule, StateArray, StateView};
use crate::Result;

/// [`Rule`] without its generics. Every rule has it.
pub(super) trait ErasedRule: std::fmt::Debug + Send + Sync {
    fn name(&self) -> &'static str;
    fn scalars(&self) -> &'static [(&'static str, f64)];
    fn check(&self) -> Result<()>;
    fn arrays(&self, shape: &[usize]) -> Vec<StateArray>;
    fn form(&self, sparse: bool) -> Result<Form, &'static str>;
    fn takes_shape(&self, shape: &[usize]) -> Result<(), &'static str>;
    fn options(&self) -> Value;
    fn bytes(&self) -> postcard::Result<Vec<u8>>;
    fn is_equal(&self, other: &dyn ErasedRule) -> bool;
    fn as_any(&self) -> &dyn Any;
    fn update_f32(&self, p: &mut [f32], g: Taken<'_, f32>, state: &mut StateView<'_, f32>);
    fn update_f64(&self, p: &mut [f64], g: Taken<'_, f64>, state: &mut StateView<'_, f64>);
}

/// A gradient in the form that the rule asked for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Taken<'a, T> {
    Dense(&'a [T]),
    Rows(Rows<'a, T>),
}

impl<R: Rule> ErasedRule for R {
    fn name(&self) -> &'static str {
        R::NAME
    }
    fn scalars(&self) -> &'static [(&'static str, f64)] {
        R::SCALARS
    }
    fn check(&self) -> Result<()> {
        Rule::check(self)
    }
    fn arrays(&self, shape: &[usize]) -> Vec<StateArray> {
        Rule::arrays(self, shape)
    }
    fn form(&self, sparse: bool) -> Result<Form, &'static str> {
        Rule::form(self, sparse)
    }
    fn takes_shape(&self, shape: &[usize]) -> Result<(), &'static str> {
        Rule::takes_shape(self, shape)
    }
    fn options(&self) -> Value {
        serde_json::to_value(self).unwrap_or(Value::Null)
    }
    fn bytes(&self) -> postcard::Result<Vec<u8>> {
        postcard::to_stdvec(self)
    }
    fn is_equal(&self, other: &dyn ErasedRule) -> bool {
        other.as_any().downcast_ref::<R>().is_some_and(|other| self == other)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn update_f32(&self, p: &mut [f32], g: Taken<'_, f32>, state: &mut StateView<'_, f32>) {
        match g {
            Taken::Dense(g) => self.update(p, g, state),
            Taken::Rows(g) => self.update_rows(p, g, state),
        }
    }
    fn update_f64(&self, p: &mut [f64], g: Taken<'_, f64>, state: &mut StateView<'_, f64>) {
        match g {
            Taken::Dense(g) => self.update(p, g, state),
            Taken::Rows(g) => self.update_rows(p, g, state),
        }
    }
}
