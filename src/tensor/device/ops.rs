//! Operations on GPUs, with their gradients. Each is `None` where it has no kernel for its operands: then they are copied here.
//!
//! An operation runs on the GPU of one of its operands, and those that are here go there. A gradient goes to where its operand is.

use rankgrad_cuda::ops::{self, AXES, Binary, Unary};
use rankgrad_cuda::products::{self, Matrix};
use rankgrad_cuda::{Array, elementwise};

use super::{CudaArray, Device, GpuFloat};
use crate::Result;
use crate::tensor::ops::record_any;
use crate::tensor::{DType, Data, Float, Gradient, RowSparse, Tensor, shape};

/// The GPU that operands are on; none if they are all here or on several.
fn common(operands: &[&Tensor]) -> Option<Device> {
    let mut devices = operands.iter().map(|x| x.device()).filter(|&device| device != Device::Cpu);
    let first = devices.next()?;
    devices.all(|device| device == first).then_some(first)
}

/// Runs an expression with `$T` as the float type of `$dtype`; none for another.
macro_rules! with_gpu_float {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $T = f32;
                $body.map(Some)
            }
            DType::F64 => {
                type $T = f64;
                $body.map(Some)
            }
            _ => Ok(None),
        }
    };
}

trait Both: GpuFloat + Float {}
impl<T: GpuFloat + Float> Both for T {}

fn wrap<T: GpuFloat>(array: Array<T>, shape: &[usize]) -> Data {
    Data::Cuda(CudaArray::of_floats(array, shape))
}

fn one(data: Data, home: Device) -> Result<Option<Gradient>> {
    Ok(Some(Gradient::Dense(data.to(home)?)))
}

fn unary_of_name(name: &str) -> Option<Unary> {
    Some(match name {
        "neg" => Unary::Neg,
        "exp" => Unary::Exp,
        "sqrt" => Unary::Sqrt,
        "abs" => Unary::Abs,
        "tanh" => Unary::Tanh,
        "sigmoid" => Unary::Sigmoid,
        "relu" => Unary::Relu,
        "add_scalar" => Unary::AddScalar,
        "sub_scalar" => Unary::SubScalar,
        "mul_scalar" => Unary::MulScalar,
        "div_scalar" => Unary::DivScalar,
        "square" => Unary::Square,
        _ => return None,
    })
}

/// A function of one operand, by its name, with the number `c` if it takes one.
pub(crate) fn unary(name: &'static str, x: &Tensor, c: f64) -> Result<Option<Tensor>> {
    fn run<T: Both>(name: &'static str, op: Unary, x: &Tensor, device: Device, c: T) -> Result<Tensor> {
        let (input, shape) = (x.data(), x.shape());
        let input = input.gpu_floats::<T>()?;
        let y = ops::unary(op, input, c)?;
        let saved = if op.saves_operand() { input.clone() } else { y.clone() };
        let output = wrap(y, &shape);
        Ok(record_any(name, output, &[x], move |g, _| {
            let gradient = ops::unary_gradient(op, g.to(device)?.gpu_floats::<T>()?, &saved, c)?;
            Ok(vec![one(wrap(gradient, &shape), device)?])
        }))
    }
    match (common(&[x]), unary_of_name(name)) {
        (Some(device), Some(op)) => with_gpu_float!(x.dtype(), T => run::<T>(name, op, x, device, <T as Float>::of(c))),
        _ => Ok(None),
    }
}

/// Sums the gradient of a broadcast operand back to the operand's shape.
fn sum_to<T: GpuFloat>(g: Array<T>, of: &[usize], shape: &[usize]) -> Result<Array<T>> {
    let extra = of.len() - shape.len();
    let is_gone = |i: usize| i < extra || (shape[i - extra] == 1 && of[i] != 1);
    sum_axes(g, of, &(0..of.len()).map(is_gone).collect::<Vec<_>>())
}

/// Sums over the marked axes: neighbouring ones together, the last group first.
fn sum_axes<T: GpuFloat>(mut x: Array<T>, shape: &[usize], marks: &[bool]) -> Result<Array<T>> {
    let (mut lengths, mut end) = (shape.to_vec(), shape.len());
    while end > 0 {
        if !marks[end - 1] {
            end -= 1;
            continue;
        }
        let start = marks[..end].iter().rposition(|gone| !gone).map_or(0, |kept| kept + 1);
        let parts = [&lengths[..start], &lengths[start..end], &lengths[end..]].map(|part| part.iter().product());
        x = ops::sum_middle(&x, parts)?;
        lengths[start..end].fill(1);
        end = start;
    }
    Ok(x)
}

/// A function of two operands, by its name.
pub(crate) fn binary(name: &'static str, a: &Tensor, b: &Tensor) -> Result<Option<Tensor>> {
    let op = match name {
        "add" => Binary::Add,
        "sub" => Binary::Sub,
        "mul" => Binary::Mul,
        "div" => Binary::Div,
        _ => return Ok(None),
    };
    let Some(device) = common(&[a, b]) else { return Ok(None) };
    let shape = shape::broadcast(name, &a.shape(), &b.shape())?;
    if shape.len() > AXES {
        return Ok(None);
    }
    with_gpu_float!(a.dtype(), T => binary_on::<T>(name, op, (a, b), device, shape))
}

fn binary_on<T: Both>(name: &'static str, op: Binary, (a, b): (&Tensor, &Tensor), device: Device, shape: Vec<usize>) -> Result<Tensor> {
    let (x, y) = (a.data().to(device)?, b.data().to(device)?);
    let (x, y) = (x.gpu_floats::<T>()?.clone(), y.gpu_floats::<T>()?.clone());
    let (left, right) = (a.shape(), b.shape());
    let output = wrap(ops::binary(op, (&x, &left), (&y, &right), &shape)?, &shape);
    let homes = [a.device(), b.device()];
    // Sums and differences save nothing.
    let saved = matches!(op, Binary::Mul | Binary::Div).then_some((x, y));
    Ok(record_any(name, output, &[a, b], move |g, needs| {
        let g = g.to(device)?;
        let g = g.gpu_floats::<T>()?;
        let with = |op, g: &Array<T>, (operand, of): (&Array<T>, &[usize])| ops::binary(op, (g, &shape), (operand, of), &shape);
        let first = match (op, &saved) {
            _ if !needs.input(0) => None,
            (Binary::Mul, Some((_, y))) => Some(with(Binary::Mul, g, (y, &right))?),
            (Binary::Div, Some((_, y))) => Some(with(Binary::Div, g, (y, &right))?),
            _ => Some(g.clone()),
        };
        let second = match (op, &saved) {
            _ if !needs.input(1) => None,
            (Binary::Sub, _) => Some(elementwise::scale(g, -T::one())?),
            (Binary::Mul, Some((x, _))) => Some(with(Binary::Mul, g, (x, &left))?),
            (Binary::Div, Some((x, y))) => {
                let ratio = ops::binary(Binary::Div, (x, &left), (y, &right), &shape)?;
                let slope = with(Binary::Div, &ratio, (y, &right))?;
                Some(with(Binary::Mul, &elementwise::scale(g, -T::one())?, (&slope, &shape))?)
            }
            _ => Some(g.clone()),
        };
        let home = |g: Option<Array<T>>, of: &[usize], home: Device| match g {
            Some(g) => one(wrap(sum_to(g, &shape, of)?, of), home),
            None => Ok(None),
        };
        Ok(vec![home(first, &left, homes[0])?, home(second, &right, homes[1])?])
    }))
}

/// The product of two matrices, or of a stack of matrices that stand one below the other with one matrix.
pub(crate) fn matmul(a: &Tensor, b: &Tensor) -> Result<Option<Tensor>> {
    let (left, right) = (a.shape(), b.shape());
    match common(&[a, b]) {
        Some(device) if left.len() >= 2 && right.len() == 2 && left.last() == right.first() => {
            with_gpu_float!(a.dtype(), T => matmul_on::<T>(a, b, device))
        }
        _ => Ok(None),
    }
}

fn matmul_on<T: Both>(a: &Tensor, b: &Tensor, device: Device) -> Result<Tensor> {
    let (left, right, homes) = (a.shape(), b.shape(), [a.device(), b.device()]);
    let (k, n) = (right[0], right[1]);
    let m = left[..left.len() - 1].iter().product();
    let (x, y) = (a.data().to(device)?, b.data().to(device)?);
    let (x, y) = (x.gpu_floats::<T>()?.clone(), y.gpu_floats::<T>()?.clone());
    fn matrix<T>(elements: &Array<T>, shape: (usize, usize), transposed: bool) -> Matrix<'_, T> {
        Matrix {
            elements,
            shape,
            transposed,
        }
    }
    let product = products::matmul(matrix(&x, (m, k), false), matrix(&y, (k, n), false))?;
    let output = wrap(product, &[&left[..left.len() - 1], &[n]].concat());
    // Each factor is saved only if the other one wants a gradient.
    let x = b.requires_grad().then_some(x);
    let y = a.requires_grad().then_some(y);
    Ok(record_any("matmul", output, &[a, b], move |g, _| {
        let g = g.to(device)?;
        let g = matrix(g.gpu_floats::<T>()?, (m, n), false);
        let first = match &y {
            Some(y) => one(wrap(products::matmul(g, matrix(y, (k, n), true))?, &left), homes[0])?,
            None => None,
        };
        let second = match &x {
            Some(x) => one(wrap(products::matmul(matrix(x, (m, k), true), g)?, &right), homes[1])?,
            None => None,
        };
        Ok(vec![first, second])
    }))
}

/// The sum or mean over the marked axes: the shape with length 1 in their place, and that of the result.
pub(crate) fn sum(
    name: &'static str,
    x: &Tensor,
    marks: &[bool],
    (kept, output): (&[usize], &[usize]),
    count: Option<f64>,
) -> Result<Option<Tensor>> {
    fn run<T: Both>(
        name: &'static str,
        x: &Tensor,
        device: Device,
        marks: &[bool],
        (kept, output): (Vec<usize>, &[usize]),
        count: Option<T>,
    ) -> Result<Tensor> {
        let shape = x.shape();
        let input = x.data();
        let mut total = sum_axes(input.gpu_floats::<T>()?.clone(), &shape, marks)?;
        if let Some(count) = count {
            total = ops::unary(Unary::DivScalar, &total, count)?;
        }
        Ok(record_any(name, wrap(total, output), &[x], move |g, _| {
            let g = g.to(device)?;
            let mut g = g.gpu_floats::<T>()?.clone();
            if let Some(count) = count {
                g = ops::unary(Unary::DivScalar, &g, count)?;
            }
            // Times one, to repeat it.
            let unit = Array::full(g.gpu(), 1, T::one())?;
            let wide = ops::binary(Binary::Mul, (&g, &kept), (&unit, &[]), &shape)?;
            Ok(vec![one(wrap(wide, &shape), device)?])
        }))
    }
    match common(&[x]) {
        Some(device) if x.ndim() <= AXES => {
            with_gpu_float!(x.dtype(), T => run::<T>(name, x, device, marks, (kept.to_vec(), output), count.map(<T as Float>::of)))
        }
        _ => Ok(None),
    }
}

/// A gradient from those of losses.
type OfLosses = dyn Fn(&[f64]) -> Result<Data> + Send;

/// Scores whose cross entropy was computed on a GPU.
pub(crate) struct Scored {
    /// For each row the sum of `exp(x - largest)`, and the target's score less the largest.
    rows: Vec<(f64, f64)>,
    gradient: Box<OfLosses>,
}

impl Scored {
    pub(crate) fn rows(&self) -> &[(f64, f64)] {
        &self.rows
    }

    /// The gradient of the scores from that of each row's loss.
    pub(crate) fn gradient(&self, losses: &[f64]) -> Result<Data> {
        (self.gradient)(losses)
    }
}

/// The parts of the cross entropy of rows of scores; logarithms are the caller's.
pub(crate) fn cross_entropy(scores: &Tensor, targets: &[usize]) -> Result<Option<Scored>> {
    fn run<T: Both>(scores: &Tensor, targets: &[usize], shape: Vec<usize>) -> Result<Scored> {
        let data = scores.data();
        let targets: Vec<i64> = targets.iter().map(|&target| target as i64).collect();
        let found = ops::cross_entropy(data.gpu_floats::<T>()?, &targets, shape[1])?;
        let wide = |x: &T| x.to_f64().unwrap_or(f64::NAN);
        let rows = found.rows.0.iter().map(wide).zip(found.rows.1.iter().map(wide)).collect();
        let gradient = move |losses: &[f64]| {
            let losses: Vec<T> = losses.iter().map(|&g| <T as Float>::of(g)).collect();
            Ok(wrap(found.gradient(&losses)?, &shape))
        };
        Ok(Scored {
            rows,
            gradient: Box::new(gradient),
        })
    }
    let shape = scores.shape();
    match (common(&[scores]), &shape[..]) {
        (Some(_), &[rows, classes]) if rows == targets.len() && classes > 0 => {
            with_gpu_float!(scores.dtype(), T => run::<T>(scores, targets, shape))
        }
        _ => Ok(None),
    }
}

/// Rows of a table, in the result's shape. Its gradient is of these rows.
pub(crate) fn embedding(table: &Tensor, places: &[usize], output: &[usize]) -> Result<Option<Tensor>> {
    fn run<T: Both>(table: &Tensor, rows: Vec<i64>, output: &[usize]) -> Result<Tensor> {
        let (data, shape) = (table.data(), table.shape());
        let width = shape[1..].iter().product();
        let found = ops::gather(data.gpu_floats::<T>()?, width, &rows)?;
        let of_rows = [&[rows.len()], &shape[1..]].concat();
        Ok(record_any("embedding", wrap(found, output), &[table], move |g, _| {
            // Rows are put together here before they are applied.
            let g = crate::tensor::ops::reshaped(g.to(Device::Cpu)?, &of_rows);
            Ok(vec![Some(Gradient::Sparse(RowSparse::new(rows.clone(), g, shape.clone())?))])
        }))
    }
    let rows: Vec<i64> = places.iter().map(|&place| place as i64).collect();
    match common(&[table]) {
        Some(_) if !table.is_empty() => with_gpu_float!(table.dtype(), T => run::<T>(table, rows, output)),
        _ => Ok(None),
    }
}
