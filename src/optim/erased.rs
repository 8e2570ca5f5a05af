//! Rules behind one type, whatever their options and the dtype of the parameter.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::Value;

use super::{Float, Form, Rows, Rule, StateArray, StateView, Step};
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
    fn is_elementwise(&self) -> bool;
    fn is_by_rows(&self) -> bool;
    fn is_equal(&self, other: &dyn ErasedRule) -> bool;
    fn as_any(&self) -> &dyn Any;
    /// The numbers of the next update, for a kernel.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "kernels alone use it"))]
    fn step_f32(&self, state: &mut StateView<'_, f32>) -> Option<Step>;
    /// As `step_f32`.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "kernels alone use it"))]
    fn step_f64(&self, state: &mut StateView<'_, f64>) -> Option<Step>;
    /// One update, or the text of a panic in it.
    fn update_f32(&self, p: &mut [f32], g: Taken<'_, f32>, state: &mut StateView<'_, f32>) -> Result<(), String>;
    /// As `update_f32`.
    fn update_f64(&self, p: &mut [f64], g: Taken<'_, f64>, state: &mut StateView<'_, f64>) -> Result<(), String>;
}

/// A gradient in the form that the rule asked for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Taken<'a, T> {
    Dense(&'a [T]),
    Rows(Rows<'a, T>),
}

/// A rule's update of one dtype.
pub(super) type RuleOn<'a, T> = dyn Fn(&mut [T], Taken<'_, T>, &mut StateView<'_, T>) -> Result<(), String> + Sync + 'a;

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
    fn is_elementwise(&self) -> bool {
        R::ELEMENTWISE
    }
    fn is_by_rows(&self) -> bool {
        R::BY_ROWS
    }
    fn is_equal(&self, other: &dyn ErasedRule) -> bool {
        other.as_any().downcast_ref::<R>().is_some_and(|other| self == other)
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
    fn step_f32(&self, state: &mut StateView<'_, f32>) -> Option<Step> {
        self.step(state)
    }
    fn step_f64(&self, state: &mut StateView<'_, f64>) -> Option<Step> {
        self.step(state)
    }
    fn update_f32(&self, p: &mut [f32], g: Taken<'_, f32>, state: &mut StateView<'_, f32>) -> Result<(), String> {
        update(self, p, g, state)
    }
    fn update_f64(&self, p: &mut [f64], g: Taken<'_, f64>, state: &mut StateView<'_, f64>) -> Result<(), String> {
        update(self, p, g, state)
    }
}

fn update<R: Rule, T: Float>(rule: &R, p: &mut [T], g: Taken<'_, T>, state: &mut StateView<'_, T>) -> Result<(), String> {
    let updated = catch_unwind(AssertUnwindSafe(|| match g {
        Taken::Dense(g) => rule.update(p, g, state),
        Taken::Rows(g) => rule.update_rows(p, g, state),
    }));
    updated.map_err(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        text.unwrap_or("a panic without a text").to_owned()
    })
}
