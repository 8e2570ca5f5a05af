//! The operations by name: how a case's attributes become arguments.

use rankgrad::tensor::{DType, Gelu, Reduction, Tensor};
use rankgrad::{Error, Result};
use serde_json::Value;

/// Runs the named operation.
///
/// # Errors
/// For a name that isn't known, a wrong number of inputs, attributes that don't make sense, and what the operation returns.
pub(crate) fn apply(op: &str, attrs: &Value, inputs: &[Tensor]) -> Result<Tensor> {
    let attrs = Attrs { op, attrs };
    match (op, inputs) {
        ("add", [a, b]) => a.add(b),
        ("sub", [a, b]) => a.sub(b),
        ("mul", [a, b]) => a.mul(b),
        ("div", [a, b]) => a.div(b),
        ("pow", [a, b]) => a.pow(b),
        ("maximum", [a, b]) => a.maximum(b),
        ("minimum", [a, b]) => a.minimum(b),
        ("where", [c, a, b]) => c.where_(a, b),
        ("eq", [a, b]) => a.eq(b),
        ("ne", [a, b]) => a.ne(b),
        ("lt", [a, b]) => a.lt(b),
        ("le", [a, b]) => a.le(b),
        ("gt", [a, b]) => a.gt(b),
        ("ge", [a, b]) => a.ge(b),
        ("neg", [x]) => x.neg(),
        ("exp", [x]) => x.exp(),
        ("log", [x]) => x.log(),
        ("sqrt", [x]) => x.sqrt(),
        ("abs", [x]) => x.abs(),
        ("sin", [x]) => x.sin(),
        ("cos", [x]) => x.cos(),
        ("tanh", [x]) => x.tanh(),
        ("sigmoid", [x]) => x.sigmoid(),
        ("relu", [x]) => x.relu(),
        ("softplus", [x]) => x.softplus(),
        ("gelu", [x]) => x.gelu(attrs.gelu()?),
        ("add_scalar", [x]) => x.add_scalar(attrs.float("value")?),
        ("sub_scalar", [x]) => x.sub_scalar(attrs.float("value")?),
        ("mul_scalar", [x]) => x.mul_scalar(attrs.float("value")?),
        ("div_scalar", [x]) => x.div_scalar(attrs.float("value")?),
        ("pow_scalar", [x]) => x.pow_scalar(attrs.float("value")?),
        ("sum", [x]) => x.sum_axes(&attrs.axes()?, attrs.flag("keepdims")?),
        ("mean", [x]) => x.mean_axes(&attrs.axes()?, attrs.flag("keepdims")?),
        ("max", [x]) => x.max_axes(&attrs.axes()?, attrs.flag("keepdims")?),
        ("logsumexp", [x]) => x.logsumexp_axes(&attrs.axes()?, attrs.flag("keepdims")?),
        ("argmax", [x]) => x.argmax(attrs.int("axis")?),
        ("softmax", [x]) => x.softmax(attrs.int("axis")?),
        ("log_softmax", [x]) => x.log_softmax(attrs.int("axis")?),
        ("matmul", [a, b]) => a.matmul(b),
        ("transpose", [x]) => match attrs.axes()?[..] {
            [] => x.transpose(-2, -1),
            [first, second] => x.transpose(first, second),
            _ => Err(attrs.wrong("axes", "two axes")),
        },
        ("permute", [x]) => x.permute(&attrs.axes()?),
        ("reshape", [x]) => x.reshape(&attrs.ints("shape")?),
        ("broadcast_to", [x]) => x.broadcast_to(attrs.lengths("shape")?),
        ("slice", [x]) => x.slice(
            attrs.int("axis")?,
            attrs.maybe("start")?,
            attrs.maybe("end")?,
            attrs.maybe("step")?.unwrap_or(1),
        ),
        ("index_select", [x, ids]) => x.index_select(attrs.int("axis")?, ids),
        ("concat", parts) => Tensor::concat(parts, attrs.int("axis")?),
        ("stack", parts) => Tensor::stack(parts, attrs.int("axis")?),
        ("embedding", [table, ids]) => table.embedding(ids),
        ("cross_entropy", [x, y]) => x.cross_entropy_with(y, attrs.reduction()?),
        ("mse", [x, y]) => x.mse_with(y, attrs.reduction()?),
        ("nll", [x, y]) => x.nll_with(y, attrs.reduction()?),
        ("cast", [x]) => x.cast(attrs.dtype()?),
        _ => Err(Error::user(format!("no operation `{op}` of {} inputs", inputs.len()))),
    }
}

/// The dtype of this name.
pub(crate) fn dtype(name: &str) -> Option<DType> {
    match name {
        "f32" => Some(DType::F32),
        "f64" => Some(DType::F64),
        "i64" => Some(DType::I64),
        "bool" => Some(DType::Bool),
        _ => None,
    }
}

/// A case's attributes. Absent ones have torch's defaults where torch has one.
struct Attrs<'a> {
    op: &'a str,
    attrs: &'a Value,
}

impl Attrs<'_> {
    fn wrong(&self, name: &str, expected: &str) -> Error {
        Error::user(format!(
            "{}: attribute `{name}` is {}, expected {expected}",
            self.op, self.attrs[name]
        ))
    }

    fn maybe(&self, name: &str) -> Result<Option<i64>> {
        match &self.attrs[name] {
            Value::Null => Ok(None),
            value => value.as_i64().map(Some).ok_or_else(|| self.wrong(name, "an integer")),
        }
    }

    fn int(&self, name: &str) -> Result<i64> {
        self.maybe(name)?.ok_or_else(|| self.wrong(name, "an integer"))
    }

    fn float(&self, name: &str) -> Result<f64> {
        self.attrs[name].as_f64().ok_or_else(|| self.wrong(name, "a number"))
    }

    fn flag(&self, name: &str) -> Result<bool> {
        match &self.attrs[name] {
            Value::Null => Ok(false),
            value => value.as_bool().ok_or_else(|| self.wrong(name, "true or false")),
        }
    }

    fn ints(&self, name: &str) -> Result<Vec<i64>> {
        let list = self.attrs[name].as_array().ok_or_else(|| self.wrong(name, "a list of integers"))?;
        list.iter()
            .map(|value| value.as_i64().ok_or_else(|| self.wrong(name, "a list of integers")))
            .collect()
    }

    fn lengths(&self, name: &str) -> Result<Vec<usize>> {
        self.ints(name)?
            .into_iter()
            .map(|n| usize::try_from(n).map_err(|_| self.wrong(name, "lengths that aren't negative")))
            .collect()
    }

    /// A list of axes, one axis, or null for all.
    fn axes(&self) -> Result<Vec<i64>> {
        match &self.attrs["axes"] {
            Value::Null => Ok(Vec::new()),
            Value::Number(_) => Ok(vec![self.int("axes")?]),
            _ => self.ints("axes"),
        }
    }

    fn text(&self, name: &str, default: &'static str) -> Result<&str> {
        match &self.attrs[name] {
            Value::Null => Ok(default),
            value => value.as_str().ok_or_else(|| self.wrong(name, "a text")),
        }
    }

    fn gelu(&self) -> Result<Gelu> {
        match self.text("approximate", "none")? {
            "none" => Ok(Gelu::Exact),
            "tanh" => Ok(Gelu::Tanh),
            _ => Err(self.wrong("approximate", "`none` or `tanh`")),
        }
    }

    fn reduction(&self) -> Result<Reduction> {
        match self.text("reduction", "mean")? {
            "mean" => Ok(Reduction::Mean),
            "sum" => Ok(Reduction::Sum),
            "none" => Ok(Reduction::None),
            _ => Err(self.wrong("reduction", "`mean`, `sum` or `none`")),
        }
    }

    fn dtype(&self) -> Result<DType> {
        dtype(self.text("dtype", "")?).ok_or_else(|| self.wrong("dtype", "`f32`, `f64`, `i64` or `bool`"))
    }
}
